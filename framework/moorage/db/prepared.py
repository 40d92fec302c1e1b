# SPDX-License-Identifier: Apache-2.0
"""Executes statements that are built once, in a fifth of the time that SQLAlchemy takes for each execution.

SQLAlchemy looks for the compiled form of a statement, collects its parameters and makes a result object again for each execution;
that takes longer than SQLite takes for the statement. A statement that is executed a second time as one and the same object is
compiled here once for each dialect and each set of parameter names. From then on only its values go to the driver.

SQLAlchemy still has the connection, the transaction, the types and the errors, and executes what is not prepared: statements that
are built for one execution, several rows on PostgreSQL and MariaDB, long lists, text, and every statement while the engine has a
listener of ``before_cursor_execute`` or ``after_cursor_execute``. No other listeners of executions are called.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

import sqlalchemy as sa
from sqlalchemy.engine.result import IteratorResult, SimpleResultMetaData
from sqlalchemy.sql.compiler import SQLCompiler
from typing_extensions import override

__all__ = ["PreparedConnection", "Rows"]

#: The longest list of an ``IN`` that is prepared. Shorter ones are filled up to a power of two, so that a statement has few forms.
_LONGEST = 1024
_OPTIONS = frozenset({"preserve_rowcount"})
_KINDS = (sa.Select, sa.CompoundSelect, sa.Insert, sa.Update, sa.Delete)
Value = Callable[[Mapping[str, Any]], Any]


class Rows:
    """The rows of a result, all read, with the methods of SQLAlchemy's results.

    :ivar rowcount: how many rows the statement has written, or -1.
    """

    __slots__ = ("_metadata", "_rest", "_rows", "rowcount")

    def __init__(self, rows: Sequence[Any], rowcount: int, metadata: SimpleResultMetaData | None) -> None:
        self._rows = rows
        self._metadata = metadata
        self._rest: IteratorResult[Any] | None = None
        self.rowcount = rowcount

    @property
    def returns_rows(self) -> bool:
        """Whether the statement returns rows, perhaps none."""
        return self._metadata is not None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def all(self) -> list[Any]:
        """Returns all rows."""
        return list(self._rows)

    def first(self) -> Any:
        """Returns the first row; None if there is none."""
        return self._rows[0] if self._rows else None

    def scalar(self) -> Any:
        """Returns the first value of the first row; None if there is none."""
        return self._rows[0][0] if self._rows else None

    def __getattr__(self, name: str) -> Any:
        # Rare or strict methods are those of SQLAlchemy.
        if name.startswith("_"):
            raise AttributeError(name)
        if self._metadata is None:
            raise sa.exc.ResourceClosedError(
                "This result object does not return rows. It has been closed automatically."
            )
        if self._rest is None:
            self._rest = IteratorResult(self._metadata, iter(self._rows))
        return getattr(self._rest, name)


class _Form:
    """A statement as one set of parameter names has it compiled."""

    def __init__(self, compiled: SQLCompiler, dialect: sa.Dialect) -> None:
        self._compiled = compiled
        self._dialect = dialect
        self._positional = compiled.positional
        self._processors: Mapping[str, Any] = compiled._bind_processors
        #: Of columns that a row does not give.
        self._defaults = {each.key: cast("sa.ColumnDefault", each.default).arg for each in compiled.insert_prefetch}
        self._lists = {compiled.bind_names[each]: each.key for each in compiled.post_compile_params}
        #: Parameters with one value for all executions (literals of the statement, defaults of columns), by name. The values are
        #: converted for the driver.
        self._fixed: dict[str, Any] = {}
        self._values = {name: self._value(name) for name in compiled.bind_names.values() if name not in self._lists}
        #: Text and values by the lengths of lists.
        self._texts: dict[tuple[int, ...], tuple[str, Any]] = {}
        #: Of rows whose values are converted.
        self._metadata: SimpleResultMetaData | None = None
        self._row: Callable[[Any], Any] | None = None
        if not self._lists:
            self._text, self._bind = compiled.string, self._binder(self._values, compiled.positiontup)

    def bind(self, given: Mapping[str, Any]) -> tuple[str, Any] | None:
        """Returns the text and the driver's parameters; None for a list that is too long.

        :raises KeyError: a parameter is missing.
        """
        if not self._lists:
            return self._text, self._bind(given)
        lengths = tuple(_padded(len(given[key])) for key in self._lists.values())
        if max(lengths) > _LONGEST:
            return None
        found = self._texts.get(lengths)
        if found is None:
            found = self._texts[lengths] = self._expanded(lengths)
        return found[0], found[1](given)

    def bind_many(self, rows: Sequence[Mapping[str, Any]]) -> tuple[str, Any]:
        """Returns the text and the driver's parameters of each row."""
        return self._text, [*map(self._bind, rows)]

    def rows(self, description: Sequence[Any], fetched: Sequence[Any], rowcount: int) -> Rows:
        """Returns the result of an execution: what the driver says of the columns, the rows that it has, and their number."""
        if self._row is None:
            self._describe(description)
        assert self._row is not None  # noqa: S101  (for the type checker)
        return Rows([*map(self._row, fetched)], rowcount, self._metadata)

    def _describe(self, description: Sequence[Any]) -> None:
        columns = self._compiled._result_columns
        readers = [
            column.type._cached_result_processor(self._dialect, described[1])
            for column, described in zip(columns, description, strict=True)
        ]
        names = [column.keyname for column in columns]
        self._metadata = metadata = SimpleResultMetaData(names)
        self._row = functools.partial(sa.Row, metadata, readers if any(readers) else None, metadata._key_to_index)

    def _binder(self, values: Mapping[str, Value], names: Sequence[str] | None) -> Value:
        """Returns a function that converts the given parameters to the driver's.

        :param values: reads each parameter.
        :param names: the parameters in the driver's order; not used by drivers that take them by name.
        """
        if not self._positional:
            items = list(values.items())
            return lambda given: {name: read(given) for name, read in items}
        names = names or ()
        plain = {
            name: bind.key
            for name in names
            if (bind := self._compiled.binds.get(name)) is not None and bind.required and not self._processors.get(name)
        }
        fixed = {name: self._fixed[name] for name in names if name in self._fixed}
        # A statement may name a parameter more than once.
        if len(names) > 1 and 2 * sum(name in plain or name in fixed for name in names) > len(names):
            keys = [name if name in fixed else plain.get(name) for name in names]
            return _picked(keys, [values[name] for name in names], fixed)
        reads = [values[name] for name in names]
        return lambda given: tuple([read(given) for read in reads])

    def _value(self, name: str) -> Value:
        """Reads one parameter from the given ones; one that is part of the statement is always the same."""
        bind = self._compiled.binds[name]
        process = self._processors.get(name)
        if name in self._defaults or not bind.required:
            constant = self._defaults.get(name, bind.effective_value)
            if process is not None:
                constant = process(constant)
            if name in self._defaults or bind.unique:
                self._fixed[name] = constant
                return lambda given: constant
            return lambda given: _read(given, bind.key, process, constant)
        key = bind.key
        if process is None:
            return lambda given: given[key]
        return lambda given: process(given[key])

    def _expanded(self, lengths: tuple[int, ...]) -> tuple[str, Any]:
        """Returns the text with lists of these lengths, as SQLAlchemy writes it."""
        sample: dict[str, Any] = dict.fromkeys(self._values)
        sample |= {name: [None] * length for name, length in zip(self._lists, lengths, strict=True)}
        state = self._compiled._process_parameters_for_postcompile(sample)
        lists = []
        for name, key in self._lists.items():
            if names := state.parameter_expansion.get(name, ()):
                lists.append((names, _list(key, len(names), state.processors.get(names[0]))))
        if self._positional:
            return state.statement, self._in_parts(state.positiontup or (), lists)
        scalars = self._binder(self._values, None)
        return state.statement, lambda given: {
            **scalars(given),
            **{name: value for names, read in lists for name, value in zip(names, read(given), strict=True)},
        }

    def _in_parts(self, names: Sequence[str], lists: Sequence[tuple[Sequence[str], Value]]) -> Value:
        """Returns a function that converts the given parameters to the driver's, a whole list at a time.

        :param names: the parameters in the driver's order. :param lists: names of the elements of each list, and what reads it.
        """
        found: list[Value] = []
        list_of = {each: number for number, (elements, _) in enumerate(lists) for each in elements}
        for number, group in itertools.groupby(names, list_of.get):
            part = list(group)
            if number is None:
                found.append(self._binder(self._values, part))
            else:
                # A statement may name a list twice, without another parameter in between.
                elements, read = lists[number]
                found += [read] * (len(part) // len(elements))
        return lambda given: tuple(itertools.chain.from_iterable([read(given) for read in found]))


def _read(given: Mapping[str, Any], key: str, process: Any, constant: Any) -> Any:
    if key not in given:
        return constant
    return given[key] if process is None else process(given[key])


def _picked(keys: Sequence[str | None], reads: Sequence[Value], fixed: Mapping[str, Any]) -> Value:
    """Returns a function that picks most values with one call, and reads only the others one by one.

    :param keys: the key of each value that needs no conversion; None: its reader is called.
    :param fixed: values that are not among the given ones, by key.
    """
    some = next(key for key in keys if key is not None)
    get: Value = operator.itemgetter(*(some if key is None else key for key in keys))
    pick: Value = (lambda given: get({**given, **fixed})) if fixed else get
    others = [(place, reads[place]) for place, key in enumerate(keys) if key is None]
    if not others:
        return pick

    def read(given: Mapping[str, Any]) -> Any:
        values = list(pick(given))
        for place, other in others:
            values[place] = other(given)
        return tuple(values)

    return read


def _padded(length: int) -> int:
    """Rounds the length of a list up to a power of two; 0 stays 0."""
    return length if length < 2 else 1 << (length - 1).bit_length()


def _list(key: str, length: int, process: Any) -> Value:
    """Returns a function that reads a list; its last element fills it up to the length."""

    def read(given: Mapping[str, Any]) -> Any:
        values = list(given[key])
        values += values[-1:] * (length - len(values))
        return values if process is None else [process(each) for each in values]

    return read


class _Prepared:
    """A statement that has been executed before, with its compiled forms by dialect, parameter names and number of rows."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Any, ...], _Form | None] = {}

    def form(self, statement: Any, dialect: sa.Dialect, names: Sequence[str], many: bool) -> _Form | None:
        """Returns the form; None if SQLAlchemy has to execute the statement."""
        key = (dialect.name, dialect.driver, many, *names)
        try:
            return self._forms[key]
        except KeyError:
            form = self._forms[key] = _prepare(statement, dialect, names, many)
            return form


def _prepare(statement: Any, dialect: sa.Dialect, names: Sequence[str], many: bool) -> _Form | None:
    if (many and dialect.name != "sqlite") or statement._execution_options.keys() - _OPTIONS:
        return None
    returning = bool(getattr(statement, "_returning", ()))
    is_insert = isinstance(statement, sa.Insert)
    if (many and returning) or (
        is_insert and not (names or statement._values or statement._multi_values or statement.select)
    ):
        return None
    # A form for many rows does not return the new keys: no caller reads them.
    compiled = statement.compile(
        dialect=dialect, column_keys=sorted(names), for_executemany=many or (is_insert and not returning)
    )
    lists = compiled.post_compile_params
    unusual = (
        any(each.default is None or not each.default.is_scalar for each in compiled.insert_prefetch)
        or compiled.update_prefetch
        or compiled.literal_execute_params
        or compiled.escaped_bind_names
        or (lists and many)
        or any(not each.expanding or each.type._is_tuple_type for each in lists)
        or any(each.callable is not None for each in compiled.binds.values())
        or any(each.required and each.key != name for each, name in compiled.bind_names.items())
        or any(each.unique and name in names for each, name in compiled.bind_names.items())
        or (compiled._result_columns and not compiled._ordered_columns)
    )
    return None if unusual else _Form(compiled, dialect)


#: Where a statement keeps a weak reference to itself and its forms; None: it was executed once. A statement that is derived from
#: it gets a copy, whose reference is to another statement. What is built for one use is forgotten with it.
_KEPT = "_moorage_prepared"


class PreparedConnection(sa.Connection):
    """A connection that executes prepared statements itself, and leaves the others to SQLAlchemy."""

    @override
    def execute(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> Any:
        """See :meth:`sqlalchemy.Connection.execute`."""
        if execution_options is None and isinstance(statement, _KINDS):
            kept = statement.__dict__.get(_KEPT)
            if kept is None or kept[0]() is not statement:
                statement.__dict__[_KEPT] = weakref.ref(statement), None
            elif self._is_usable():
                if kept[1] is None:
                    kept = statement.__dict__[_KEPT] = kept[0], _Prepared()
                found = self._execute_prepared(kept[1], statement, {} if parameters is None else parameters)
                if found is not None:
                    return found
        return super().execute(statement, parameters, execution_options=execution_options)

    def write_driver_sql(self, text: str, values: tuple[Any, ...]) -> None:
        """Executes a statement that returns no rows; its text and its values are as the driver has them."""
        if self._is_usable():
            self._run(None, text, values, many=False)
        else:
            self.exec_driver_sql(text, values)

    def _is_usable(self) -> bool:
        """Whether there is an open transaction, and no savepoint that has ended; SQLAlchemy says what is wrong otherwise.

        Nor may there be listeners of executions: SQLAlchemy calls them.
        """
        outer, nested, block = self._transaction, self._nested_transaction, self._trans_context_manager
        listeners = self.engine.dispatch
        return (
            outer is not None
            and outer.is_active
            and (nested is None or nested.is_active)
            and (block is None or block._transaction_is_active())
            and not (listeners.before_cursor_execute or listeners.after_cursor_execute)
        )

    def _execute_prepared(self, prepared: _Prepared, statement: Any, parameters: Any) -> Rows | None:
        # The check of an abstract class takes longer than that of a type.
        many = type(parameters) is not dict and not isinstance(parameters, Mapping)
        if many and not parameters:
            return None
        if many and len(parameters) == 1:
            parameters, many = parameters[0], False
        form = prepared.form(statement, self.dialect, tuple(parameters[0] if many else parameters), many)
        if form is None:
            return None
        try:
            bound = form.bind_many(parameters) if many else form.bind(parameters)
        except Exception:  # noqa: BLE001  (SQLAlchemy takes the values, or says what is wrong with them)
            return None
        return None if bound is None else self._run(form, *bound, many=many)

    def _run(self, form: _Form | None, text: str, values: Any, *, many: bool) -> Rows:
        """Executes a statement by the driver.

        :param form: reads the rows; None: the statement returns none.
        """
        cursor = None
        try:
            cursor = self.connection.cursor()
            if many:
                self.dialect.do_executemany(cursor, text, values, None)
            else:
                self.dialect.do_execute(cursor, text, values, None)
            described = cursor.description
            fetched = cursor.fetchall() if described is not None else ()
        except BaseException as error:  # noqa: BLE001  (raised again, as SQLAlchemy and its listeners have it)
            self._failed(error, text, values, cursor)
        rowcount = cursor.rowcount
        cursor.close()
        return (
            Rows((), rowcount, None) if described is None or form is None else form.rows(described, fetched, rowcount)
        )

    def _failed(self, error: BaseException, text: str, values: Any, cursor: Any) -> NoReturn:
        of_driver = isinstance(error, self.dialect.loaded_dbapi.Error)
        # Without a text, SQLAlchemy leaves an error that is not the driver's as it is.
        self._handle_dbapi_exception(error, text if of_driver else None, values if of_driver else None, cursor, None)
