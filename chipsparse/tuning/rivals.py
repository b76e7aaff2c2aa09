"""Which forms rival each other, one choice after the other.

What the calibration can tell for nothing, such as when a forecast is to begin, is settled by it;
the rest is for generations to tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from chipsparse.tuning.forms import USUAL_GROWTH, ActionSeconds, Form, Lists
from chipsparse.tuning.jump_costs import list_cost

# The likeliest first: where there is no time for all, the last ones are left out.
GROWTHS = (0.75, 1.25, 0.5, 1.0)
FRONT_LOADS = (2.0, 1.5, 2.5, 3.0)
DENSITIES = (0.2, 0.1, 0.3, 0.05)
FORECASTS = (0.0, 0.5, 0.25, 1.0)
FORECASTS_AFTER = (0.0, 0.25, 0.5)
SPARSE_ERRORS = (0.3, 0.1, 0.6)


@dataclass(frozen=True)
class Rivals:
    """Makes them.

    Attributes:
        lists: what the calibration says.
        seconds: what steps take.
    """

    lists: Lists
    seconds: ActionSeconds

    def first(self, count: int) -> Form:
        """The form that the calibration says is best with so many full steps, nothing sparse."""
        return min(self.of_forecast(Form(), count), key=lambda form: self._cost(form, count))

    def of_forecast(self, form: Form, count: int) -> Iterator[Form]:
        """Each share of a forecast, begun where it is best with so many full steps."""
        for share in FORECASTS:
            ways = [
                replace(form, reuse=replace(form.reuse, forecast=share, forecast_after=after))
                for after in (FORECASTS_AFTER if share else (0.0,))
            ]
            yield min(ways, key=lambda way: self._cost(way, count))

    def of_correction(self, form: Form, count: int) -> Iterator[Form]:
        """Skipped steps left as they are, with a list and a forecast for that."""
        left = replace(form, reuse=replace(form.reuse, correct=False))
        yield min(self.of_forecast(left, count), key=lambda way: self._cost(way, count))

    def of_lists(self, form: Form, count: int) -> Iterator[Form]:
        """Each kind of list of full steps."""
        for growth in GROWTHS:
            yield replace(form, growth=growth, front_load=None)
        for front_load in FRONT_LOADS:
            yield replace(form, growth=None, front_load=front_load)

    def of_sparse_steps(self, form: Form, count: int) -> Iterator[Form]:
        """Which steps are sparse, and how sparse they are: placed one by one, or by a rule."""
        middle, every_other = (replace(form.reuse, between=b) for b in ("middle", "every_other"))
        growth = USUAL_GROWTH if form.growth is None else form.growth
        placed = replace(form, growth=growth, front_load=None, sparse_error=SPARSE_ERRORS[0])
        usual, sparser, *others = DENSITIES
        yield replace(placed, density=usual)
        yield replace(placed, density=sparser)
        yield replace(form, reuse=middle, density=usual)
        for error in SPARSE_ERRORS[1:]:
            yield replace(placed, sparse_error=error)
        yield replace(form, reuse=every_other, density=sparser)
        for keep in others:
            yield replace(placed, density=keep)
        yield replace(form, reuse=middle, density=sparser)
        yield replace(form, reuse=every_other, density=usual)

    def of_sparse_mlps(self, form: Form, count: int) -> Iterator[Form]:
        """With sparse MLPs, where sparse steps are faster so."""
        seconds = self.seconds.sparse
        fast = seconds.get((form.density, True))
        if form.is_sparse and fast is not None and fast < seconds[form.density, False]:
            yield replace(form, sparse_mlp=True)

    def _cost(self, form: Form, count: int) -> float:
        """Of what is held or forecast, before it may be corrected."""
        growth = USUAL_GROWTH if form.growth is None else form.growth
        costs = self.lists.costs(replace(form.reuse, correct=False), growth)
        return list_cost(costs, self.lists.steps(form, count).full)
