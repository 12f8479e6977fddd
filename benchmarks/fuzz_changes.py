"""What people do to the modules of a model in memory, as ``fuzz_training.py --changes`` draws it: hooks, forwards and
classes of their own, weights that modules share, other modules in the place of theirs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

__all__ = ["changed", "draw_change"]

_SHARE = 0.75
"""What a changed module gives, of what it gave: no power of two, which rounding would not show."""


def draw_change(dice: random.Random, model: nn.Module) -> str:
    """What is done with which module, as JSON."""
    what = dice.choice(list(_CHANGES))
    names = [name for name, own in model.named_modules() if not isinstance(own, nn.ModuleList)]
    leaves = [name for name in names if not list(model.get_submodule(name).children())]
    where = dice.choice(leaves if dice.random() < 0.6 else names)
    options = {"what": what, "where": where}
    if what.startswith("share"):
        options |= _pair(dice, model, whole=what == "share module")
    return json.dumps(options)


def _pair(dice: random.Random, model: nn.Module, *, whole: bool) -> dict[str, str]:
    """Two modules, or parameters, of which one could take the place of the other."""
    alike: dict[Any, list[str]] = {}
    if whole:
        for name, module in model.named_modules():
            shapes = tuple((key, own.shape) for key, own in module.named_parameters())
            if shapes:
                alike.setdefault((type(module), shapes), []).append(name)
    else:
        for name, own in model.named_parameters():
            alike.setdefault((own.shape, own.requires_grad), []).append(name)
    first, second = dice.sample(dice.choice([names for names in alike.values() if len(names) > 1]), 2)
    return {"where": first, "from": second}


def changed(model: nn.Module, options: str) -> nn.Module:
    """The model itself, with that change."""
    given = json.loads(options)
    _CHANGES[given.pop("what")](model, given)
    return model


def _less(made: Any) -> Any:
    """The first floating tensor of what a module gives, smaller."""
    if isinstance(made, Tensor):
        return made * _SHARE if _floats(made) else made
    if isinstance(made, tuple):
        place = next((place for place, own in enumerate(made) if _floats(own)), None)
        if place is not None:
            return (*made[:place], _less(made[place]), *made[place + 1 :])
    return made


def _smaller(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _less(type(self).forward(self, *args, **kwargs))


def _on(change: Callable[[Any], object], model: nn.Module, given: dict[str, str]) -> None:
    change(model.get_submodule(given["where"]))


def _forward_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, args, made: _less(made))


def _input_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, args: _less(args))


def _backward_hook(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda _, inside, outside: _less(inside))


def _method(module: Any) -> None:
    module.forward = MethodType(_smaller, module)


def _closure(module: Any) -> None:
    before = module.forward
    module.forward = lambda *args, **kwargs: _less(before(*args, **kwargs))


def _own_class(module: Any) -> None:
    kind = type(module)
    module.__class__ = type(f"Own{kind.__name__}", (kind,), {"forward": lambda *a, **k: _less(kind.forward(*a, **k))})


def _mixing(module: nn.Module) -> None:
    """Of the features, which a rank may have some of."""
    module.register_forward_hook(lambda _, args, made: made - made.mean(-1, keepdim=True) if _floats(made) else made)


def _floats(made: Any) -> bool:
    return isinstance(made, Tensor) and made.is_floating_point()


def _embedding(model: nn.Module, given: dict[str, str], option: str, value: float) -> None:
    own = next((own for own in model.modules() if isinstance(own, nn.Embedding)), None)
    if own is not None:
        setattr(own, option, value)


def _replaced(model: nn.Module, given: dict[str, str], made: Callable[[], nn.Module]) -> None:
    """Where a module has no parameters, and is no container: an activation or a dropout."""
    if given["where"] and not list(model.get_submodule(given["where"]).parameters()):
        _set(model, given["where"], made())


def _share(model: nn.Module, given: dict[str, str]) -> None:
    owner, _, name = given["from"].rpartition(".")
    _set(model, given["where"], getattr(model.get_submodule(owner), name))


def _set(model: nn.Module, name: str, value: Any) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, value)


_CHANGES: dict[str, Callable[[nn.Module, dict[str, str]], object]] = {
    "forward hook": partial(_on, _forward_hook),
    "input hook": partial(_on, _input_hook),
    "backward hook": partial(_on, _backward_hook),
    "mixing hook": partial(_on, _mixing),
    "method": partial(_on, _method),
    "closure": partial(_on, _closure),
    "class": partial(_on, _own_class),
    "max_norm": partial(_embedding, option="max_norm", value=0.5),
    "scale_grad_by_freq": partial(_embedding, option="scale_grad_by_freq", value=True),
    "softmax": partial(_replaced, made=lambda: nn.Softmax(-1)),
    "tanh": partial(_replaced, made=nn.Tanh),
    "share": _share,
    "share module": _share,
}
