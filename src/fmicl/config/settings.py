"""Settings of a run: the options of everything it consists of, in one flat, immutable namespace.

A run consists of a task (images or text), a method, an objective and so on, each with its own options dataclass. A
:class:`Schema` collects the options of all that could be chosen; :class:`Settings` has a value for each of them and
says which are used:

    settings = recipe("cifar10", divergence="js", epochs=200)
    settings.epochs, settings.queue          # a value for every option, used or not
    settings[OptimisationOptions]            # an options dataclass that is used, validated
    settings.unused()                        # options without effect, with the reason
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from fmicl.config.common import MachineOptions, MethodChoice, ObjectiveChoice, OptimisationOptions
from fmicl.data import DATASETS
from fmicl.divergences import DIVERGENCES
from fmicl.losses import OBJECTIVES
from fmicl.losses.registry import ObjectiveContext, ObjectiveOptions
from fmicl.methods import METHODS, MethodOptions
from fmicl.utils.options import Option, options_of
from fmicl.utils.registry import Registry, unknown_name

T = TypeVar("T")

CHOICES: dict[str, Registry[Any]] = {
    "method": METHODS,
    "objective": OBJECTIVES,
    "divergence": DIVERGENCES,
    "dataset": DATASETS,
}
"""Options whose value is a name in a registry."""


@dataclass(frozen=True)
class Group:
    """An options dataclass in a schema: always used, or used if an option has a certain value.

    Attributes:
        options: the dataclass.
        title: heading in `--help`, such as "method moco".
        choice: the option that decides, with its value; None if the group is always used.
    """

    options: Any
    title: str
    choice: tuple[str, str] | None = None


@dataclass(frozen=True)
class TaskOptions:
    """A kind of data to train on, as far as its settings go; `fmicl.training` has the behaviour.

    Attributes:
        name: images or text.
        groups: its option groups, beside those of method, objective, optimisation and machine.
        defaults: defaults of common options that differ for this task.
        check: refuses combinations of options of several groups.
        why_unused: options that have no effect for reasons of the task, with the reason.
        resolve: values that replace automatic ones.
        from_data: options that may be "auto": `fmicl.training` chooses their values when it has seen the data.
        contrast_views: whether the negatives of a softmax loss are the other second views alone.
        high_precision: whether the objective needs inner products in float32.
        data_option: the option that says where the data is.
        needs_data: whether these settings need it.
        packages: whose versions are worth recording.
        loader: how Python loads the encoder of a run.
    """

    name: str
    groups: tuple[Group, ...]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    check: Callable[[Settings], None] = lambda _: None
    why_unused: Callable[[Settings], dict[str, str]] = lambda _: {}
    resolve: Callable[[Settings], dict[str, Any]] = lambda _: {}
    from_data: tuple[str, ...] = ()
    contrast_views: bool = False
    high_precision: bool = False
    data_option: str = "data"
    needs_data: Callable[[Settings], bool] = lambda _: True
    packages: tuple[str, ...] = ()
    loader: str = ""


TASKS: dict[str, TaskOptions] = {}
"""The tasks, by name; `fmicl.config.tasks` fills it."""


@dataclass(frozen=True)
class Recipe:
    """Values of options under a name: what `fmicl train NAME` trains."""

    task: str
    settings: Mapping[str, Any]


RECIPES: Registry[Recipe] = Registry("recipe")


def register_recipe(name: str, *, summary: str, task: str = "images", **settings: Any) -> None:
    """Register values of options under a name, which `fmicl train` and :func:`recipe` take.

    Example:
        >>> register_recipe("my_digits", summary="Digits, briefly.", dataset="digits", epochs=2)
        >>> recipe("my_digits").epochs
        2
        >>> RECIPES.unregister("my_digits")
    """
    RECIPES.register(name, summary=summary)(Recipe(task, settings))


def recipe(name: str, **changes: Any) -> Settings:
    """The settings of a recipe, with changes.

    Raises:
        ValueError: an unknown recipe or option, a value out of range, or options that contradict each other.

    Example:
        >>> settings = recipe("cifar10", divergence="js", epochs=200)
        >>> settings.encoder, settings.batch_size, settings.alpha, settings.divergence
        ('resnet18', 512, 40.0, 'js')
    """
    return Settings(name, **changes)


class Schema:
    """All options that a task's settings have, and the groups that they belong to."""

    def __init__(self, task: TaskOptions) -> None:
        self.task = task
        self.groups = [
            Group(ObjectiveChoice, "objective"),
            *(Group(entry.value, f"objective {entry.name}", ("objective", entry.name)) for entry in OBJECTIVES),
            *(Group(entry.value, f"divergence {entry.name}", ("divergence", entry.name)) for entry in DIVERGENCES),
            Group(MethodChoice, "method"),
            *(Group(entry.value, f"method {entry.name}", ("method", entry.name)) for entry in METHODS),
            Group(OptimisationOptions, "optimisation"),
            *task.groups,
            *_dataset_groups(task),
            Group(MachineOptions, "machine"),
        ]
        self.options: dict[str, Option] = {}
        self.owners: dict[str, list[Group]] = {}
        for group in self.groups:
            for option in options_of(group.options):
                self._add(option, group)
        self.defaults = {name: option.default for name, option in self.options.items()}

    def _add(self, option: Option, group: Group) -> None:
        if hasattr(Settings, option.name) or option.name.startswith("_"):
            raise ValueError(f"option {option.name} of {group.title} has a name that Settings uses: choose another")
        if option.name in CHOICES:
            names = tuple(CHOICES[option.name].names())
            option = dataclasses.replace(option, type=Literal[names])
        if option.name in self.task.from_data and option.type is not str:
            option = dataclasses.replace(option, type=option.type | Literal["auto"])
        if option.name in self.task.defaults:
            option = dataclasses.replace(option, default=self.task.defaults[option.name])
        before = self.options.setdefault(option.name, option)
        if before != option:
            owner = self.owners[option.name][0].title
            raise ValueError(
                f"option {option.name} of {group.title} is declared differently from that of {owner}: declare it once "
                "in a common base class, or choose another name"
            )
        self.owners.setdefault(option.name, []).append(group)

    def convert(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values with the types of their options: strings as paths, lists as tuples, whole numbers as floats.

        Raises:
            ValueError: an unknown option; the message names the near ones.
        """
        for name in values:
            if name not in self.options:
                raise unknown_name("option", name, self.options)
        return {name: _converted(value, self.options[name].type) for name, value in values.items()}

    def used(self, values: Mapping[str, Any]) -> list[Group]:
        """The groups that are used with these values."""
        found = [group for group in self.groups if group.choice is None or values[group.choice[0]] == group.choice[1]]
        objective = next(group.options for group in found if group.choice == ("objective", values["objective"]))
        if not any(option.name == "divergence" for option in options_of(objective)):
            found = [group for group in found if group.choice is None or group.choice[0] != "divergence"]
        return found

    def owner_titles(self, name: str) -> str:
        """The groups that an option belongs to, in words.

        Example:
            >>> schema_of("images").owner_titles("encoder_momentum")
            'method byol, moco, mocov3'
            >>> schema_of("images").owner_titles("negatives")
            'every objective'
        """
        titles = [group.title for group in self.owners[name]]
        first, *others = titles
        kind = first.split()[0]
        if others and len(titles) == len(CHOICES.get(kind, ())):
            return f"every {kind}"
        return ", ".join([first, *(title.removeprefix(f"{kind} ") for title in others)])


def _dataset_groups(task: TaskOptions) -> list[Group]:
    """The options of datasets that have their own, for a task that has datasets."""
    if not any(option.name == "dataset" for group in task.groups for option in options_of(group.options)):
        return []
    infos = [(entry.name, entry.value.options) for entry in DATASETS]
    return [Group(kind, f"dataset {name}", ("dataset", name)) for name, kind in infos if kind is not None]


_SCHEMAS: dict[tuple[Any, ...], Schema] = {}


def schema_of(task: str) -> Schema:
    """The schema of a task, with everything that is registered now."""
    key = (task, *(entry for name in CHOICES for entry in CHOICES[name]))
    if task not in TASKS:
        raise unknown_name("task", task, TASKS)
    if key not in _SCHEMAS:
        _SCHEMAS[key] = Schema(TASKS[task])
    return _SCHEMAS[key]


class Settings:
    """All options of a run, immutable; see :func:`recipe`.

    Args:
        name: a recipe.
        changes: values of options that differ from it.

    Raises:
        ValueError: an unknown recipe or option, a value out of range, or options that contradict each other.
    """

    recipe: str
    task: TaskOptions
    schema: Schema

    def __init__(self, name: str, /, **changes: Any) -> None:
        self._fill(name, RECIPES[name].value, changes)

    def _fill(self, name: str, base: Recipe, changes: Mapping[str, Any]) -> None:
        schema = schema_of(base.task)
        defaults = {**schema.defaults, **schema.convert(base.settings)}
        values = {**defaults, **schema.convert(changes)}
        for key, value in values.items():
            if key in CHOICES and value not in CHOICES[key]:
                raise unknown_name(CHOICES[key].kind, value, CHOICES[key].names())
            schema.options[key].check(value)
        groups = {}
        for group in schema.used(values):
            names = [option.name for option in options_of(group.options)]
            # What the data will decide has its declared default until then.
            known = {key: values[key] for key in names if key not in schema.task.from_data or values[key] != "auto"}
            groups[group.options] = group.options(**known)
        self.__dict__.update(
            recipe=name, task=schema.task, schema=schema, _base=base, _values=values, _groups=groups,
            changes={key: value for key, value in values.items() if value != defaults[key]},
        )  # fmt: skip
        schema.task.check(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"settings have no option {name!r}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"settings are immutable: settings.replace({name}=...) makes others")

    def __getitem__(self, options: type[T]) -> T:
        return cast(T, self._groups[options])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and (self.recipe, self._values) == (other.recipe, other._values)

    def __hash__(self) -> int:
        return hash((self.recipe, json.dumps(self.to_json(), sort_keys=True)))

    def __repr__(self) -> str:
        changes = "".join(f", {name}={value!r}" for name, value in self.changes.items())
        return f"recipe({self.recipe!r}{changes})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Settings.from_json, (self.recipe, self.changes, self.task.name)

    @property
    def values(self) -> dict[str, Any]:
        """The values of all options, used or not."""
        return dict(self._values)

    @property
    def unresolved(self) -> tuple[str, ...]:
        """Options that are "auto", for the data to decide.

        Example:
            >>> recipe("images", epochs=5, encoder="resnet18", size=64).unresolved
            ('batch_size', 'learning_rate', 'mean', 'std')
        """
        return tuple(name for name in self.task.from_data if self._values[name] == "auto")

    def replace(self, **changes: Any) -> Settings:
        """The same settings with other values.

        Example:
            >>> recipe("digits", divergence="js").replace(epochs=3)
            recipe('digits', divergence='js', epochs=3)
        """
        return Settings._of(self.recipe, self._base, {**self.changes, **changes})

    @property
    def method_options(self) -> MethodOptions:
        """The options of the chosen method."""
        return cast(MethodOptions, self._groups[METHODS[self.method].value])

    @property
    def objective_options(self) -> ObjectiveOptions:
        """The options of what is optimised: the chosen objective, or the method's own loss.

        Raises:
            ValueError: the method doesn't take this objective.
        """
        chosen = cast(ObjectiveOptions, self._groups[OBJECTIVES[self.objective].value])
        return self.method_options.resolve_objective(chosen)

    def objective_context(self, dim: int = 512, classes: int = 0) -> ObjectiveContext:
        """What the objective is told about the run, with embeddings of this dimension and data of so many classes."""
        divergence = DIVERGENCES[self.divergence].value
        parameters = {option.name: self._values[option.name] for option in options_of(divergence)}
        return ObjectiveContext(
            dim=dim,
            method=self.method,
            contrast_views=self.task.contrast_views or self.method_options.method.contrast_views,
            high_precision=self.task.high_precision,
            divergence_parameters=parameters,
            detached=self.method_options.detached(),
            explicit_negatives=self.method_options.method.explicit_negatives,
            classes=classes,
        )

    def used(self) -> dict[str, Any]:
        """The options that have an effect, with their values; automatic values are resolved."""
        names = {option.name for kind in self._groups for option in options_of(kind)}
        reasons = self._reasons()
        values = {name: self._values[name] for name in self.schema.options if name in names and name not in reasons}
        for group in self._groups.values():
            if hasattr(group, "resolved"):
                resolved = group.resolved()
                values |= {
                    option.name: getattr(resolved, option.name)
                    for option in options_of(group.__class__)
                    if option.name in values
                }
        return {**values, **{name: x for name, x in self.task.resolve(self).items() if name in values}}

    def _reasons(self) -> dict[str, str]:
        """Options of groups that are used, or of others, that these declare without effect, with the reason."""
        found: dict[str, str] = {}
        if self.method_options.own_loss:
            reason = f"method {self.method} has a loss of its own"
            kinds = ("objective", "divergence")
            owners = self.schema.owners.items()
            found = {name: reason for name, groups in owners if all(g.title.startswith(kinds) for g in groups)}
        for group in self._groups.values():
            if hasattr(group, "why_unused"):
                found |= group.why_unused()
        return {**found, **self.task.why_unused(self)}

    def unused(self) -> dict[str, str]:
        """Options that differ from the recipe and have no effect, with the reason.

        Example:
            >>> recipe("digits", siglip_bias=-5.0, queue=512).unused()
            {'siglip_bias': 'it is an option of objective siglip', 'queue': 'it is an option of method moco'}
        """
        used, reasons = self.used(), self._reasons()
        return {
            name: reasons.get(name) or f"it is an option of {self.schema.owner_titles(name)}"
            for name in self.changes
            if name not in used
        }

    def differences(self, before: Settings) -> str:
        """What a run with these settings computes differently from one with others, in words; "" if nothing.

        Options that are unresolved here agree with any value.

        Example:
            >>> now = recipe("digits", alpha=10.0, device="cpu")
            >>> now.differences(recipe("digits"))
            'alpha was 20.0, is now 10.0'
        """
        then, now = before._computed(), self._computed()
        names = [name for name in {**now, **then} if then.get(name) != now.get(name) and name not in self.unresolved]
        return "; ".join(f"{name} was {then.get(name)}, is now {now.get(name)}" for name in names)

    def _computed(self) -> dict[str, Any]:
        return {name: value for name, value in self.used().items() if self.schema.options[name].role == "compute"}

    def identity(self) -> dict[str, Any]:
        """What tells this run from others: the used options that differ from their defaults, but for the machine's.

        An option that is added later, with a default that changes nothing, leaves the identity as it is.
        """
        roles = {name: self.schema.options[name].role for name in self.schema.options}
        values = {name: value for name, value in self.used().items() if roles[name] != "machine"}
        return {name: _json(value) for name, value in values.items() if value != self.schema.defaults[name]}

    @property
    def hash(self) -> str:
        """Eight hexadecimal digits of the identity.

        Example:
            >>> recipe("digits").hash == recipe("digits", checkpoint_steps=5, queue=512).hash
            True
        """
        text = json.dumps([self.task.name, self.identity()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def to_json(self) -> dict[str, Any]:
        """The options of all used groups as JSON types, in the schema's order; :meth:`from_json` is the inverse."""
        names = {option.name for kind in self._groups for option in options_of(kind)}
        return {name: _json(self._values[name]) for name in self.schema.options if name in names}

    @classmethod
    def from_json(cls, name: str, values: Mapping[str, Any], task: str = "images") -> Settings:
        """Settings from what :meth:`to_json` gave.

        Args:
            name: the recipe. If it is not registered here, options that are missing have their declared defaults.
            values: the options.
            task: the task of a recipe that is not registered here.

        Raises:
            ValueError: as for :class:`Settings`.

        Example:
            >>> settings = recipe("digits", divergence="js")
            >>> Settings.from_json("digits", settings.to_json()) == settings
            True
        """
        return cls._of(name, RECIPES[name].value if name in RECIPES else Recipe(task, {}), values)

    @classmethod
    def _of(cls, name: str, base: Recipe, changes: Mapping[str, Any]) -> Settings:
        settings = cls.__new__(cls)
        settings._fill(name, base, changes)
        return settings

    def arguments(self) -> list[str]:
        """The command-line arguments by which ``fmicl train RECIPE`` gets these settings.

        Example:
            >>> recipe("digits", divergence="js", baselines=False, shift="optimal").arguments()
            ['--divergence', 'js', '--shift', 'optimal', '--no-baselines']
        """
        words: list[str] = []
        for name in self.schema.options:
            if name not in self.changes:
                continue
            option, value = self.schema.options[name], self.changes[name]
            if option.type is bool:
                words.append(option.flag if value else f"--no-{option.flag[2:]}")
            elif isinstance(value, list | tuple):
                words += [option.flag, *(str(x) for x in value)]
            else:
                words += [option.flag, str(value)]
        return words


def _converted(value: Any, hint: Any) -> Any:
    """A value in its option's type: paths for strings, tuples for lists, floats for whole numbers, no numpy numbers.

    Equal values have one form, so that they have one hash.
    """
    if hasattr(value, "item") and not hasattr(value, "backward"):
        value = value.item()
    kinds = (hint, *typing.get_args(hint))
    if isinstance(value, list | tuple):
        return tuple(_converted(item, kinds[1] if len(kinds) > 1 else None) for item in value)
    if isinstance(value, str) and Path in kinds:
        return Path(value)
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
        return float(value)
    return value


def _json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value
