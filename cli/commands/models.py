"""`chipsparse models`: which models can run sparse, and what of them."""

from __future__ import annotations

from chipsparse.cli.options import PrintOptions


def models(options: PrintOptions) -> None:
    """List the models that can run sparse, and what of each."""
    # Imported here so that --help does not wait for torch and diffusers.
    from chipsparse.cli.model.description import quiet_libraries
    from chipsparse.cli.model.listed import list_models
    from chipsparse.cli.views.terminal import print_result

    with quiet_libraries(debug=options.debug):
        models = list_models()
    print_result(models, as_json=options.json)
