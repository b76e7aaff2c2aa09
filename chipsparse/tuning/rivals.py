"""Which forms rival each other, one choice after the other.

What the calibration can tell for nothing, such as when a forecast is to begin, is settled by it;
the rest is for generations to tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from chipsparse.tuning.forms import ActionSeconds, Form, Lists

# The likeliest first: where there is no time for all, the last ones are left out.
GROWTHS = (1.0, 2.0, 1.5)
DENSITIES = (0.2, 0.1, 0.3, 0.05)
FORECASTS = (0.5, 0.75, 0.0, 0.25, 1.0)
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
        return min(self.of_forecast(Form(), count), key=lambda form: self.lists.drift(form, count))

    def of_forecast(self, form: Form, count: int) -> Iterator[Form]:
        """Each share of a forecast, begun where it is best with so many full steps."""
        for share in FORECASTS:
            ways = [
                replace(form, reuse=replace(form.reuse, forecast=share, forecast_after=after))
                for after in (FORECASTS_AFTER if share else (0.0,))
            ]
            yield min(ways, key=lambda way: self.lists.drift(way, count))

    def of_correction(self, form: Form, count: int) -> Iterator[Form]:
        """Skipped steps left as they are, with a list and a forecast for that."""
        left = replace(form, reuse=replace(form.reuse, correct=False))
        yield min(self.of_forecast(left, count), key=lambda way: self.lists.drift(way, count))

    def of_lists(self, form: Form, count: int) -> Iterator[Form]:
        """Each kind of list of full steps."""
        for growth in GROWTHS:
            yield replace(form, growth=growth)

    def of_sparse_steps(self, form: Form, count: int) -> Iterator[Form]:
        """Which steps are sparse, and how sparse they are: placed one by one, or by a rule."""
        middle, every_other = (replace(form.reuse, between=b) for b in ("middle", "every_other"))
        placed = replace(form, sparse_error=SPARSE_ERRORS[0])
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
