"""What the adapters' tests ask of a model and of a report."""


def actions(handle, branch="cond"):
    """The action of every call of a branch."""
    return [record.action.value for record in handle.report.steps if record.branch == branch]


def state_of(model):
    """Classes, attributes and hooks of all modules, to compare before and after."""
    return {
        name: (
            type(module).__mro__,  # a patched class equals the stock one
            set(vars(module)) - {"_diffusers_hook"},  # diffusers makes it in cache_context
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            dict(vars(module.processor)) if hasattr(module, "processor") else None,
            {key: value.stride() for key, value in module.named_parameters(recurse=False)},
        )
        for name, module in model.named_modules()
    }
