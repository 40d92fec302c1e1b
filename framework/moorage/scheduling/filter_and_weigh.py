# SPDX-License-Identifier: Apache-2.0
"""Filters and weighers in order: which nodes can take a request, and which is best.

The filters that answer for sets are asked first, the smallest set first; those that look at one node at a time see only what is
left, in the configured order. The answer is that of the naive loop over all nodes and filters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from moorage import errors, plugin_isolation
from moorage.read_only import EMPTY, FrozenDict, frozen_array, frozen_mapping
from moorage.scheduling.interface import (
    SKIP,
    HostFilter,
    HostState,
    HostWeigher,
    Mask,
    RequestSpec,
    Rows,
    Skip,
    Where,
)
from moorage.scheduling.nova.loading import load_filters, load_weighers
from moorage.scheduling.plugin_runner import CallSlot, PluginRunner
from moorage.scheduling.sample import Sample
from moorage.scheduling.snapshot import Snapshot
from moorage.scheduling.weights import Weighing, best_of, sum_of

__all__ = ["Pipeline", "Ranking", "load", "load_filters", "load_weighers", "of"]

T = TypeVar("T")
_EVERYWHERE = slice(None)
_BULK = {"mask_rows", "filter_rows"}
_SEE_FLEET = {"prepare", *_BULK}
_JUDGE = {"host_passes", *_SEE_FLEET}
_WEIGH = {"weigh_rows", "row_multipliers", "multiplier"}
#: While more than one of so many nodes is left, they are kept as a yes or no for each, which costs less than a list of them.
_WIDE = 8


@dataclass(frozen=True, slots=True)
class _Filter:
    name: str
    group: str
    distribution: str
    who: str
    advisory: bool
    plugin: HostFilter
    #: Which of the optional hooks it has.
    prepares: bool = field(init=False)
    limits: bool = field(init=False)
    masks: bool = field(init=False)
    bulk: bool = field(init=False)

    @property
    def judges(self) -> bool:
        """Whether its answer may follow from the instances of a node."""
        return self.plugin.needs_instances or self.plugin.judges_instances

    def __post_init__(self) -> None:
        kind = type(self.plugin)
        object.__setattr__(self, "prepares", kind.prepare is not HostFilter.prepare)
        object.__setattr__(self, "limits", kind.limits is not HostFilter.limits)
        # A subclass that overrides ``filter_rows`` means its own.
        last = next(vars(each).keys() & _BULK for each in kind.__mro__ if vars(each).keys() & _BULK)
        object.__setattr__(self, "masks", "mask_rows" in last and kind.mask_rows is not HostFilter.mask_rows)
        object.__setattr__(self, "bulk", not self.masks and kind.filter_rows is not HostFilter.filter_rows)


@dataclass(frozen=True, slots=True)
class _Weigher:
    name: str
    group: str
    distribution: str
    who: str
    plugin: HostWeigher
    advisory: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """Holds the answers of the plugins about the nodes of a fleet for one request. A ranking follows from them.

    :param rows: those that passed, ascending.
    :param removed: filter -> how many nodes it removed.
    :param weighings: the raw weights of these rows; empty if there are fewer than two rows.
    :ivar counts: how many nodes were considered, passed and were removed by which filter, as the journal keeps it.
    """

    rows: Rows
    considered: int
    removed: dict[str, int]
    weighings: list[Weighing]
    counts: FrozenDict = field(init=False, compare=False)

    def __post_init__(self) -> None:
        removed = {name: count for name, count in self.removed.items() if count}
        counts = {"considered": self.considered, "passed": len(self.rows), "removed": removed}
        object.__setattr__(self, "counts", frozen_mapping(counts))

    def ranking(self, best: Rows, weights: npt.NDArray[np.float64], **more: Any) -> Ranking:
        """Returns the ranking with some of the rows.

        :param best: their indexes in ``rows``, best first. :param weights: their weights.
        :param more: further fields of the ranking.
        """
        return Ranking(self.rows[best], weights, self.considered, len(self.rows), self.removed, judgement=self, **more)


@dataclass(frozen=True, slots=True)
class Ranking:
    """What a pipeline found.

    :param rows: the best of the rows that passed, best first; equal ones in the order of the fleet.
    :param passed: how many passed.
    :param preferred: how many of them every weigher prefers, where the fleet is a sample; otherwise 0.
    :param removed: filter -> how many nodes it removed, in the order in which they were asked.
    :param promising: the filters that judged the instances of nodes, and which rows those were shown whose answer depends on
        that (``needs_order``).
    :param judgement: the answers of the plugins for all rows that passed.
    """

    rows: Rows
    weights: npt.NDArray[np.float64]
    considered: int
    passed: int
    removed: dict[str, int] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    promising: tuple[tuple[_Filter, Rows | None], ...] = ()
    preferred: int = 0
    judgement: Judgement = field(compare=False, repr=False, kw_only=True)


@dataclass(slots=True)
class _Run:
    """One request on its way through the filters.

    :param rows: what is left of the fleet; None while much of it is: then it is ``mask``, or (None too) all of it.
    :param count: how many are left.
    """

    guard: PluginRunner
    slot: CallSlot
    fleet: Snapshot
    spec: RequestSpec
    rows: Rows | None
    count: int
    mask: Mask | None = None
    removed: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    #: The filters that had something to say, and the rows that those with ``needs_order`` were shown.
    asked: list[tuple[_Filter, Rows | None]] = field(default_factory=list)

    def left(self) -> Rows:
        """Returns the rows that are left."""
        if self.rows is None:
            if self.mask is None:
                return self.fleet.all_rows
            self.rows = frozen_array(np.flatnonzero(self.mask))
        return self.rows

    def keep(self, name: str, left: Rows) -> None:
        """The filter leaves these."""
        self._count(name, len(left))
        self.rows = frozen_array(left)

    def keep_where(self, name: str, passed: Mask) -> None:
        """The filter says yes or no of each that was shown: of the rows, or of the whole fleet while much of it is left."""
        if self.rows is not None:
            self.keep(name, self.rows[passed])
            return
        self.mask = passed if self.mask is None else self.mask & passed
        self._count(name, int(np.count_nonzero(self.mask)))
        if self.count * _WIDE < len(self.mask):
            self.left()

    def keep_common(self, name: str, allowed: Rows) -> None:
        """The filter leaves none but these."""
        if self.rows is None and len(allowed) * _WIDE < self.fleet.size:
            allowed = allowed if len(allowed) < 2 else np.unique(allowed)
            self.keep(name, allowed if self.mask is None else allowed[self.mask[allowed]])
            return
        passed = np.zeros(self.fleet.size, dtype=np.bool_)
        passed[allowed] = True
        self.keep_where(name, passed if self.rows is None else passed[self.rows])

    def _count(self, name: str, left: int) -> None:
        self.removed[name] = self.removed.get(name, 0) + self.count - left
        self.count = left

    def ask(self, each: _Filter, question: Callable[[HostFilter], T]) -> T | Skip:
        """Ask a filter; SKIP when it raised and the request goes on without it.

        :raises InvalidInput: it cannot make sense of the request.
        :raises PluginFailed: it raised anything else.
        """
        self.slot.begin(each)
        try:
            with plugin_isolation.isolate_plugin_call(each.name):
                return question(each.plugin)
        except errors.InvalidInput:
            raise
        except Exception as error:  # noqa: BLE001  (whatever a plugin may raise)
            self.guard.failed(each, error)
            self.skipped.append(each.name)
            return SKIP


class Pipeline:
    """An immutable set of filters and weighers; a request uses one from beginning to end."""

    def __init__(self, filters: Sequence[_Filter], weighers: Sequence[_Weigher]) -> None:
        self._filters = tuple(filters)
        self._weighers = tuple(weighers)
        self._all: tuple[_Filter | _Weigher, ...] = (*self._filters, *self._weighers)
        #: Whether a filter judges the traits that a request asks for.
        self.judges_traits = any(each.plugin.judges_traits for each in filters)
        #: Whether a random part of a large fleet will do: no plugin's answer for a node depends on all nodes.
        self.spreads = all(_spreads(each.plugin) for each in weighers) and all(
            _judges_alone(each.plugin) for each in filters
        )
        #: The plugins without a declaration that their answers for a node do not depend on the use of other nodes, nor on the uuid
        #: and name of the instance. While there are any, no answer holds for another request.
        self.not_alone = (
            *(each.name for each in filters if each.limits or not _declares_alone(each.plugin)),
            *(each.name for each in weighers if not _weighs_alone(each.plugin)),
        )
        #: The plugins without a declaration that they ignore whose request it is. While there are any, no answer holds for another
        #: project or user.
        self.reads_owner = (
            *(each.name for each in filters if not _declares(each.plugin, HostFilter, "ignores_owner", _JUDGE)),
            *(each.name for each in weighers if not _declares(each.plugin, HostWeigher, "ignores_owner", _WEIGH)),
        )
        self._rebuilding = tuple(each for each in filters if each.plugin.RUN_ON_REBUILD)

    @property
    def filter_names(self) -> tuple[str, ...]:
        """The filters in the configured order."""
        return tuple(each.name for each in self._filters)

    def spreads_over(self, guard: PluginRunner, fleet: Snapshot) -> bool:
        """Returns whether aggregates leave every weigher's multiplier its sign; it follows from the nodes alone."""
        with guard.slot() as slot:
            for each in self._weighers:
                slot.begin(each)
                try:
                    with plugin_isolation.isolate_plugin_call(each.name):
                        some = each.plugin.row_multipliers(fleet, fleet.all_rows)
                        general = each.plugin.multiplier
                        if some is not None and bool((some * general < 0 if general else some != 0).any()):
                            return False
                except Exception:  # noqa: BLE001  (whatever a plugin may raise: ranking all nodes reports it)
                    return False
        return True

    def run(
        self,
        guard: PluginRunner,
        fleet: Snapshot,
        rows: Rows,
        spec: RequestSpec,
        *,
        most: int | None = None,
        filtered: bool = True,
    ) -> Ranking:
        """Filter and rank the given rows of the fleet.

        :param most: how many of the best are wanted; all when None. With 0 the nodes are judged, and not compared.
        :param filtered: whether to ask the filters at all; nodes that may not host anything fall all the same.
        :raises InvalidInput: a plugin cannot make sense of the request.
        :raises PluginFailed: a plugin raised or answered nonsense; the request must be refused.
        :raises PluginTimeout: a plugin is not run any more because it hung too often.
        """
        guard.check_breakers(self._all)
        spec = fleet.resolved(spec)
        with guard.slot() as slot:
            run = _Run(guard, slot, fleet, spec, None if len(rows) == fleet.size else frozen_array(rows), len(rows))
            if not spec.rebuild and not fleet.all_can_host:
                where = _EVERYWHERE if run.rows is None else run.rows
                run.keep_where("can_host", fleet.can_host[where])
            if filtered:
                self._filter(run, self._asked(spec))
            left = run.left()
            # A single node need not be compared.
            weighings = self._weigh(run, left) if len(left) > 1 or most == 0 else []
            preferred = self._preferred(run, left) if isinstance(fleet, Sample) and most != 0 else 0
        # Asked last: a class written for Nova shows only by running what it reads.
        promising = tuple(pair for pair in run.asked if pair[0].judges)
        judgement = Judgement(left, len(rows), run.removed, weighings)
        weights = sum_of([each.weights() for each in weighings if most != 0], len(left))
        best = best_of(weights, most)
        return judgement.ranking(
            best, weights[best], skipped=tuple(run.skipped), promising=promising, preferred=preferred
        )

    def refused_by(self, guard: PluginRunner, fleet: Snapshot, row: int, spec: RequestSpec, ranking: Ranking) -> str:
        """Ask the filters that judged instances again about one node; the name of one that refuses it, or nothing.

        Each is asked in the way in which it was asked for the ranking, so that on an unchanged fleet it answers the same.

        :param fleet: the fleet of the ranking, with what is known of the node by now.
        """
        spec = fleet.resolved(spec)
        alone = np.array([row], dtype=np.intp)
        with guard.slot() as slot:
            for each, shown in ranking.promising:
                rows = alone if shown is None else shown
                run = _Run(guard, slot, fleet, spec, rows, len(rows))
                self._in_any_order(run, [each])
                if row not in run.left():
                    return each.name
        return ""

    def limits(self, guard: PluginRunner, fleet: Snapshot, row: int, spec: RequestSpec) -> Mapping[str, Any]:
        """What the filters promise of a node that passed them.

        :raises PluginFailed: a plugin raised, or what it promises is no JSON data.
        """
        asked = [each for each in self._asked(spec) if each.limits]
        if not asked:
            return EMPTY
        found: dict[str, Any] = {}
        spec = fleet.resolved(spec)
        host = fleet.host_state(row)
        with guard.slot() as slot:
            run = _Run(guard, slot, fleet, spec, np.array([row], dtype=np.intp), 1)
            for each in asked:
                promised = run.ask(each, lambda plugin: _promised(plugin, host, spec))
                if promised is SKIP:
                    continue
                for name, limit in promised.items():
                    both = (limit, found.get(name, limit))
                    found[name] = min(both) if all(isinstance(one, int | float) for one in both) else limit
        return found

    def explain(self, guard: PluginRunner, fleet: Snapshot, row: int, spec: RequestSpec) -> dict[str, str]:
        """Why a node does not pass: filter -> reason, for every filter that refuses it."""
        spec = fleet.resolved(spec)
        host = fleet.host_state(row)
        reasons = {}
        with guard.slot() as slot:
            run = _Run(guard, slot, fleet, spec, np.array([row], dtype=np.intp), 1)
            for each in self._asked(spec):

                def why(plugin: HostFilter) -> str:
                    if plugin.prepare(spec, fleet) is SKIP or plugin.host_passes(host, spec):
                        return ""
                    return plugin.explain(host, spec) or "it refused it"

                reason = run.ask(each, why)
                if reason and reason is not SKIP:
                    reasons[each.name] = reason
        return reasons

    def _asked(self, spec: RequestSpec) -> Sequence[_Filter]:
        return self._rebuilding if spec.rebuild else self._filters

    def _filter(self, run: _Run, filters: Sequence[_Filter]) -> None:
        """All filters; one that needs its configured place divides the others into those before and those after it."""
        free: list[_Filter] = []
        for each in filters:
            if not each.plugin.needs_order:
                free.append(each)
                continue
            self._in_any_order(run, free)
            free = []
            self._in_any_order(run, [each])
        self._in_any_order(run, free)

    def _in_any_order(self, run: _Run, filters: Sequence[_Filter]) -> None:
        """Runs filters, cheap ones first: those that know their nodes beforehand, then by sets, by keys and by nodes."""
        plain = [each for each in self._prepare(run, filters) if not self._by_sets(run, each)]
        if len(plain) > 1:
            # Those that are asked once for each key come first.
            plain.sort(key=lambda each: run.ask(each, run.fleet.key_column) is None)
        for each in plain:
            if not run.count:
                return
            passed = run.ask(each, lambda plugin: _one_by_one(plugin, run.fleet, run.left(), run.spec))
            if passed is not SKIP:
                run.keep(each.name, passed)

    def _by_sets(self, run: _Run, each: _Filter) -> bool:
        """Have a filter answer for all rows that are left; False when it answers for one at a time."""
        if not run.count:
            return True
        if each.masks:
            where = _EVERYWHERE if run.rows is None else run.rows
            mask = run.ask(each, lambda plugin: _mask(plugin, run.fleet, where, run.spec))
            if isinstance(mask, np.ndarray):
                run.keep_where(each.name, mask)
            return mask is not None
        if each.bulk:
            passed = run.ask(each, lambda plugin: _passed(plugin, run.fleet, run.left(), run.spec))
            if isinstance(passed, np.ndarray):
                run.keep(each.name, passed)
            return passed is not None
        return False

    def _prepare(self, run: _Run, filters: Sequence[_Filter]) -> list[_Filter]:
        """Asks the filters for the sets that they know beforehand, and returns the filters that must be asked again."""
        asked: list[_Filter] = []
        sets: list[tuple[int, str, Rows]] = []
        for each in filters:
            answer = run.ask(each, lambda plugin: _prepared(plugin, run.spec, run.fleet)) if each.prepares else None
            if answer is SKIP:
                continue
            run.asked.append((each, run.left() if each.plugin.needs_order else None))
            if answer is not None:
                sets.append((len(answer), each.name, answer))
                if each.plugin.prepare_is_final:
                    continue
            asked.append(each)
        if len(sets) > 1:
            sets.sort(key=lambda entry: entry[0])
        for _, name, allowed in sets:
            run.keep_common(name, allowed)
        return asked

    def _weigh(self, run: _Run, rows: Rows) -> list[Weighing]:
        """Returns the raw weights of each weigher whose multiplier is not 0."""
        found: list[Weighing] = []
        for each in self._weighers if len(rows) else ():
            run.slot.begin(each)
            try:
                with plugin_isolation.isolate_plugin_call(each.name):
                    multiplier = _multiplier(each.plugin, run.fleet, rows)
                    if isinstance(multiplier, np.ndarray) or multiplier:
                        raw = _raw(each.plugin, run.fleet, rows, run.spec)
                        found.append(Weighing(raw, multiplier, each.plugin.minval, each.plugin.maxval))
            except errors.InvalidInput:
                raise
            except Exception as error:  # noqa: BLE001  (whatever a plugin may raise)
                run.guard.failed(each, error)
        return found

    def _preferred(self, run: _Run, rows: Rows) -> int:
        """Returns how many of the rows every weigher prefers; none if one raises, so that all nodes are ranked."""
        mask: Mask = np.ones(len(rows), dtype=np.bool_)
        for each in self._weighers:
            run.slot.begin(each)
            try:
                with plugin_isolation.isolate_plugin_call(each.name):
                    some = each.plugin.preferred(run.fleet, rows, run.spec)
                    mask = mask if some is None else mask & some
            except errors.InvalidInput:
                raise
            except Exception as error:  # noqa: BLE001  (whatever a plugin may raise)
                run.guard.failed(each, error)
                return 0
        return int(np.count_nonzero(mask))


def _judges_alone(plugin: HostFilter) -> bool:
    """What the filter declares, but for classes below that see the fleet in another way."""
    # Nothing but host_passes is shown one node.
    shown_one = not any(vars(kind).keys() & {"judges_alone", *_SEE_FLEET} for kind in _below(plugin, HostFilter))
    return not plugin.needs_order and (shown_one or _declares_alone(plugin))


def _declares_alone(plugin: HostFilter) -> bool:
    """Returns whether the filter itself declares ``judges_alone``."""
    return not plugin.needs_order and _declares(plugin, HostFilter, "judges_alone", _SEE_FLEET)


def _spreads(plugin: HostWeigher) -> bool:
    """What the weigher declares, but for classes below that weigh in another way."""
    return _declares(plugin, HostWeigher, "spreads", _WEIGH)


def _weighs_alone(plugin: HostWeigher) -> bool:
    """Returns whether the weigher declares ``weighs_alone``."""
    return _declares(plugin, HostWeigher, "weighs_alone", _WEIGH)


def _declares(plugin: object, base: type, name: str, otherwise: Collection[str]) -> bool:
    """Returns what a plugin declares; False if a subclass of the declaring class overrides a method that it is about.

    :param name: the class attribute or property.
    :param otherwise: the names of these methods.
    """
    for kind in _below(plugin, base):
        if name in vars(kind):
            return bool(getattr(plugin, name))
        if not vars(kind).keys().isdisjoint(otherwise):
            break
    return False


def _below(plugin: object, base: type) -> Sequence[type]:
    """Returns the classes of a plugin that are derived from ``base``, the most derived first."""
    kinds = type(plugin).__mro__
    return kinds[: kinds.index(base)]


def _promised(plugin: HostFilter, host: HostState, spec: RequestSpec) -> Mapping[str, Any]:
    promised: Mapping[str, Any] = json.loads(json.dumps(dict(plugin.limits(host, spec)), allow_nan=False))
    return promised


def _prepared(plugin: HostFilter, spec: RequestSpec, fleet: Snapshot) -> Skip | Rows | None:
    answer = plugin.prepare(spec, fleet)
    return answer if answer is None or answer is SKIP else _checked(answer, fleet.size)


def _passed(plugin: HostFilter, fleet: Snapshot, rows: Rows, spec: RequestSpec) -> Rows | None:
    answer = plugin.filter_rows(fleet, rows, spec)
    if answer is None:
        return None
    passed = _checked(answer, fleet.size)
    # What other filters have removed must not come back, and nothing may stand there twice.
    there = np.zeros(fleet.size, dtype=np.bool_)
    there[rows] = True
    if not there[passed].all():
        raise ValueError("filter_rows answered rows that it was not given")
    there[passed] = False
    if np.count_nonzero(there) + len(passed) != len(rows):
        raise ValueError("filter_rows answered a row more than once")
    return passed


def _mask(plugin: HostFilter, fleet: Snapshot, where: Where, spec: RequestSpec) -> Mask | None:
    mask = plugin.mask_rows(fleet, where, spec)
    if mask is None:
        return None
    mask = np.asarray(mask)
    wanted = fleet.size if isinstance(where, slice) else len(where)
    if mask.dtype != np.bool_ or mask.shape != (wanted,):
        raise TypeError("mask_rows must answer one yes or no for each row")
    return mask


def _one_by_one(plugin: HostFilter, fleet: Snapshot, rows: Rows, spec: RequestSpec) -> Rows:
    """Returns a filter that looks at one node at a time: once for each key that it gives, or once for each node."""
    keys = fleet.key_column(plugin)
    if keys is not None:
        return keys.rows_where(rows, lambda row: bool(plugin.host_passes(fleet.host_state(row), spec)))
    passing = [bool(plugin.host_passes(fleet.host_state(row), spec)) for row in rows.tolist()]
    left: Rows = rows[np.array(passing, dtype=np.bool_)]
    return left


def _multiplier(plugin: HostWeigher, fleet: Snapshot, rows: Rows) -> Any:
    """Returns the multiplier of a weigher: a number, or an array with one for each of the rows."""
    multipliers = plugin.row_multipliers(fleet, rows)
    if multipliers is None:
        return plugin.multiplier
    found = np.asarray(multipliers, dtype=np.float64)
    if found.shape != rows.shape or not np.isfinite(found).all():
        raise ValueError("row_multipliers must answer one finite number for each row")
    return found


def _raw(plugin: HostWeigher, fleet: Snapshot, rows: Rows, spec: RequestSpec) -> npt.NDArray[np.float64]:
    """Returns the raw weights of a weigher, as an array of the right shape."""
    raw = np.asarray(plugin.weigh_rows(fleet, rows, spec), dtype=np.float64)
    if raw.shape != rows.shape:
        raise ValueError("weigh_rows must answer one finite number for each row")
    return raw


def _checked(rows: Any, size: int) -> Rows:
    """Rows as a plugin answered them; a plugin that answers nonsense has failed."""
    found: Rows = np.asarray(rows)
    if found.ndim != 1 or (found.dtype != np.intp and len(found) and not np.issubdtype(found.dtype, np.integer)):
        raise TypeError("rows must be a one-dimensional array of whole numbers")
    found = found.astype(np.intp, copy=False)
    # Seen as unsigned, a negative number is larger than any.
    if len(found) and found.view(np.uintp).max() >= size:
        raise ValueError(f"rows must be between 0 and {size - 1}")
    return found


def of(filters: Sequence[HostFilter], weighers: Sequence[HostWeigher] = ()) -> Pipeline:
    """Returns the pipeline of plugins that are there already, in this order; for their tests."""
    return Pipeline(
        [_Filter(*_named_after(each), each.advisory, each) for each in filters],
        [_Weigher(*_named_after(each), each) for each in weighers],
    )


def _named_after(plugin: HostFilter | HostWeigher) -> tuple[str, str, str, str]:
    """Returns (name, group, distribution, who) of a plugin object that was not loaded through an entry point."""
    kind = type(plugin)
    return kind.__name__, "of objects", kind.__module__, f"plugin '{kind.__name__}' (of {kind.__module__})"


def load(conf: Any) -> Pipeline:
    """Returns the pipeline that the configuration names.

    :raises PluginLoadError: a plugin is missing or cannot be used.
    :raises ConfigError: a filter needs instances, which are not tracked.
    """
    filters, weighers = load_filters(conf), load_weighers(conf)
    needing = [each.name for each in filters if each.plugin.needs_instances]
    if needing and not conf.scheduling.track_instance_changes:
        raise errors.ConfigError(
            f"The filters {', '.join(needing)} need to know instances: set [scheduling] track_instance_changes = true, or take "
            "them out of [scheduling] enabled_filters."
        )
    return Pipeline(
        [
            _Filter(each.name, each.group, each.distribution, each.who, each.plugin.advisory, each.build(conf=conf))
            for each in filters
        ],
        [_Weigher(each.name, each.group, each.distribution, each.who, each.build(conf=conf)) for each in weighers],
    )
