"""Questions of the adapters' tests to a model, a report and the process."""

import inspect
import random
import threading
import warnings

import torch

OF_LIBRARIES = ("tqdm_monitor", "InductorSubproc", "subproc_worker_timer")


def actions(handle, branch="cond"):
    return [record.action.value for record in handle.report.steps if record.branch == branch]


def calls_begun(handle):
    """The context and the layout of every call of the transformer from now on, as they come."""
    calls = []
    session = handle._adapters[0].session
    begin = session.begin

    def look(decision, plan, reading):
        calls.append((decision.place, reading.layout))
        return begin(decision, plan, reading)

    session.begin = look
    return calls


def calls_of(model, run):
    """The arguments, by name, of every call of a model while a function runs."""
    calls = []
    names = [*inspect.signature(model.forward).parameters]

    def look(_module, args, kwargs):
        calls.append({**dict(zip(names, args, strict=False)), **kwargs})

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    run()
    hook.remove()
    return calls


def state_of(model):
    """Classes, attributes and hooks of all modules, to compare before and after."""
    return {
        name: (
            type(module).__mro__,  # a patched class equals the stock one
            set(vars(module)) - {"_diffusers_hook"},  # diffusers makes it in cache_context
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            (module.processor, type(module.processor), {**vars(module.processor)})
            if hasattr(module, "processor")
            else None,
            {key: value.stride() for key, value in module.named_parameters(recurse=False)},
        )
        for name, module in model.named_modules()
    }


def process_state():
    """By name, what belongs to the whole process."""
    on_gpu = torch.cuda.is_available()
    generators = [torch.default_generator, *(torch.cuda.default_generators if on_gpu else ())]
    return {
        "random state": ([each.get_state().tolist() for each in generators], random.getstate()),
        "warning filters": (warnings.filters[:], warnings.showwarning),
        "dtype and dispatch": (torch.get_default_dtype(), torch._C._len_torch_dispatch_stack()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "threads": (
            torch.get_num_threads(),
            [each.name for each in threading.enumerate() if each.name not in OF_LIBRARIES],
        ),
        "waits for the GPU": torch.cuda.get_sync_debug_mode() if on_gpu else 0,
    }
