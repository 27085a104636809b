"""The two programs of a test: one runs the code under test, the other the tests; only plain data passes between them.

It is sent into two sandboxes as source and uses only the standard library. The code under test never sees a test or an
expected value, only the arguments of each call. Its results are decoded into plain data (numbers, strings, containers)
or stay on its side behind a `Proxy`. Such an object is judged here by its plain content if its class derives from a
plain one, and is otherwise unequal to plain data. So a program passes a test only by a right answer: an `__eq__` that
always agrees, a patched builtin, a printed marker, an early exit all stay on its own side. SECURITY.md lists the
remaining gaps. The tests' side trusts no message that arrives on its pipe.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import json
import operator
import os
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # imports are most of the cost of a test; hence also the imports inside functions
    import ast
    import symtable
    from collections.abc import Callable, Iterator
    from typing import Any

_MAX_MESSAGE = 1 << 24
_PLAIN = (type(None), bool, float, str)
_SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "s": set, "f": frozenset, "q": collections.deque}
_MAPPINGS: dict[str, Any] = {"C": collections.Counter, "d": dict}
_CHANGING = {list, set, collections.deque, collections.Counter, dict, bytearray}
# tag -> module, class, text of an instance, instance from a text
_BY_TEXT: dict[str, tuple[str, str, Callable[[Any], str], Callable[[Any, str], Any]]] = {
    "b": ("builtins", "bytes", lambda v: v.hex(), lambda kind, text: kind.fromhex(text)),
    "ba": ("builtins", "bytearray", lambda v: v.hex(), lambda kind, text: kind.fromhex(text)),
    "c": ("builtins", "complex", str, lambda kind, text: kind(text)),
    "r": (
        "builtins",
        "range",
        lambda v: f"{v.start} {v.stop} {v.step}",
        lambda kind, text: kind(*map(int, text.split())),
    ),
    "D": ("decimal", "Decimal", str, lambda kind, text: kind(text)),
    "F": ("fractions", "Fraction", str, lambda kind, text: kind(text)),
    "dt": ("datetime", "datetime", lambda v: v.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "da": ("datetime", "date", lambda v: v.isoformat(), lambda kind, text: kind.fromisoformat(text)),
}


def _text_kinds() -> Iterator[tuple[str, type, Callable[[Any], str]]]:
    """Yield tag, class and writer of each class above whose module is loaded: others have no instances."""
    for tag, (module, name, text, _) in _BY_TEXT.items():
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type):
            yield tag, kind, text


class _Plain:
    """Marks an object whose plain content is to be sent."""

    def __init__(self, content: object) -> None:
        self.content = content


# Classes with the same meaning on both sides; without exceptions that end a program.
_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for name, kind in vars(builtins).items()
    if type(kind) is type and name[0] != "_" and (issubclass(kind, Exception) or not issubclass(kind, BaseException))
}


class RemoteError(Exception):
    """An exception of the code under test that is not a builtin `Exception`."""


class Proxy:
    """An object that stays on the other side: attributes, calls, items, and operators among such objects.

    An operator between it and an object of this side is computed here, on its plain content, or refused: the other
    side never sees the operand.

    Args:
        peer: the connection to the other side.
        handle: its number there.
        derived: whether its class derives from a plain one.
    """

    def __init__(self, peer: Peer, handle: int, derived: bool) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_handle", handle)
        object.__setattr__(self, "_derived", derived)

    def _plain(self) -> Any:
        """Return its content as plain data, without its own methods. Raises TypeError if its class is not plain."""
        if not self._derived:
            raise TypeError("an object of the code under test does not mix with plain data")
        return self._peer.content(self._handle)

    def _ask(self, name: str, *operands: object) -> Any:
        return self._peer.ask("apply", name, self, *operands)

    def __getattr__(self, name: str) -> Any:
        if name in _JUDGING:
            return getattr(self._plain(), name)
        if name.startswith("__") and "array" in name:  # NumPy would read memory at the address in these
            raise AttributeError(name)
        return self._peer.ask("get", self._handle, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._peer.ask("set", self._handle, name, value)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call it there; its changes of plain arguments are made here too."""
        answer, after = self._peer.ask("call", self._handle, list(args), kwargs)
        for mine, theirs in zip((*args, *kwargs.values()), after, strict=False):
            _update(mine, theirs)
        return answer

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *_: object) -> None:
        """Ignore its result, which could silence a failed assertion."""
        self.__getattr__("__exit__")(None, None, None)

    def __bool__(self) -> bool:
        """Return True for an object that is not plain data: the other side's `__bool__` does not count."""
        return not self._derived or bool(self._plain())

    def __eq__(self, other: object) -> bool:
        if _foreign(self, other):
            return bool(self._ask("eq", other))
        return self._derived and bool(self._plain() == _content(other))

    def __hash__(self) -> int:
        return hash(self._plain() if self._derived else self._handle)

    def __len__(self) -> int:
        return len(self._plain()) if self._derived else self._ask("len")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._plain()) if self._derived else self._ask("iter")

    def __contains__(self, item: object) -> bool:
        return item in self._plain() if self._derived else any(each is item or each == item for each in self)

    def __getitem__(self, key: object) -> Any:
        if self._derived:
            try:
                return self._plain()[key]
            except (LookupError, TypeError):  # it may have a `__missing__`, or keys of its own
                pass
        return self._ask("getitem", key)

    def __format__(self, spec: str) -> str:
        return format(self._plain(), spec) if spec else str(self)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Proxy) and bool(instance._ask("isinstance", self))


def _content(value: object) -> Any:
    return value._plain() if isinstance(value, Proxy) else value


def _foreign(one: Proxy, other: object) -> bool:
    """Return whether both objects are the other side's, and not both have plain content."""
    return isinstance(other, Proxy) and not (one._derived and other._derived)


def _update(mine: Any, theirs: Any) -> Any:
    """Apply a call's changes to an argument; it and the containers in it remain the same objects."""
    if type(mine) is not type(theirs):
        return theirs
    if mine == theirs:
        return mine
    if isinstance(mine, list | tuple | collections.deque):
        theirs = type(mine)([*map(_update, mine, theirs), *list(theirs)[len(mine) :]])
    elif isinstance(mine, dict):
        theirs = {key: _update(mine[key], value) if key in mine else value for key, value in theirs.items()}
    if isinstance(mine, list | bytearray):
        mine[:] = theirs
    elif isinstance(mine, dict | set | collections.deque):
        mine.clear()
        (mine.extend if isinstance(mine, collections.deque) else mine.update)(theirs)
    else:
        return theirs
    return mine


def _forward(name: str) -> Callable[..., Any]:
    """Return a method that the other side computes; it does not involve an expected value."""
    return lambda self, *operands: self._ask(name, *operands)


def _convert(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *operands: function(self._plain(), *operands)


def _compare(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: Proxy, other: object) -> Any:
        return self._ask(name, other) if _foreign(self, other) else function(self._plain(), _content(other))

    return method


def _compute(name: str, reflected: bool) -> Callable[..., Any]:
    """Return an arithmetic method: on plain contents here; there only for two of its objects, giving a third.

    Otherwise `abs(f(2) - 4) < 1e-6` would show the program the expected value and then trust its result.
    """

    def method(self: Proxy, other: object) -> Any:
        pair = (other, self) if reflected else (self, other)
        if not _foreign(self, other):
            return getattr(operator, name)(*map(_content, pair))
        result = self._peer.ask("apply", name, *pair)
        if isinstance(result, Proxy) and not result._derived:
            return result
        raise TypeError("arithmetic of objects of the code under test gave plain data")

    return method


_FORWARDED = ("str", "repr", "next", "setitem", "delitem")
_COMPARED = ("lt", "le", "gt", "ge")
_COMPUTED = ("add", "sub", "mul", "truediv", "mod", "floordiv", "pow", "matmul", "and_", "or_", "xor")
_APPLY: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in ("len", "iter", "isinstance", *_FORWARDED[:3])},
    **{name: getattr(operator, name) for name in ("getitem", "eq", *_FORWARDED[3:], *_COMPARED, *_COMPUTED)},
}
# Predicates of plain data, such as `startswith`: objects that are not plain data must not answer them.
_JUDGING = {
    name for kind in (float, str, bytes, set) for name in vars(kind) if name.startswith(("is", "starts", "ends"))
}
for _name in _FORWARDED:
    setattr(Proxy, f"__{_name}__", _forward(_name))
for _name in _COMPARED:
    setattr(Proxy, f"__{_name}__", _compare(_name))
for _name in _COMPUTED:
    setattr(Proxy, f"__{_name.strip('_')}__", _compute(_name, reflected=False))
    setattr(Proxy, f"__r{_name.strip('_')}__", _compute(_name, reflected=True))
for _function in (abs, float, int, complex, round, operator.index, operator.neg):
    setattr(Proxy, f"__{_function.__name__}__", _convert(_function))


class Peer:
    """One end of the pipes, which are not inherited by children.

    Args:
        read_fd: pipe from the other end.
        write_fd: pipe to the other end.
        trusting: let the other end read its objects, not only call them.
    """

    def __init__(self, read_fd: int, write_fd: int, *, trusting: bool) -> None:
        self._reader, self._writer = os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")
        self._trusting = trusting
        self._objects: list[Any] = []
        self._handles: dict[int, int] = {}  # by id, since the objects stay alive
        self._contents: dict[int, Any] = {}  # by handle of the other side's objects: their first content, for good
        self._passing: dict[int, Any] = {}  # contents that may change when the other side's code runs again

    def send(self, kind: str, value: object) -> None:
        """Send one message. If the other side has ended, exit: a test could catch an exception."""
        message = json.dumps([kind, self._encode(value)]).encode()
        try:
            self._writer.write(message + b"\n")
            self._writer.flush()
        except OSError:
            os._exit(1)

    def receive(self) -> tuple[str, Any]:
        """Receive one message. Raises ValueError, RecursionError and others if it is invalid."""
        line = self._reader.readline(_MAX_MESSAGE)
        if not line.endswith(b"\n"):
            os._exit(1)
        kind, value = json.loads(line)
        return kind, self._decode(value)

    def ask(self, *request: object) -> Any:
        """Return the answer of the other side, which may call us back first."""
        self._passing.clear()
        self.send("ask", list(request))
        while True:
            kind, value = self.receive()
            if kind == "ask":
                self.answer(value)
            elif kind == "raise":
                error = _exception(*value)
                # it would end a `map` in the tests without an error
                stray = isinstance(error, StopIteration) and request[:2] != ("apply", "next")
                raise RemoteError("StopIteration") if stray else error
            else:
                return value

    def content(self, handle: int) -> Any:
        """Return the plain content of the other side's object. Raises TypeError if it can no longer be requested."""
        if handle in self._contents:
            return self._contents[handle]
        if handle not in self._passing:
            content = self.ask("plain", handle)
            if type(content) not in _CHANGING:
                raise TypeError("the content of a number or a text must come with it")
            self._passing[handle] = content
        return self._passing[handle]

    def answer(self, request: list[Any]) -> None:
        """Serve a request of the other side, which can neither read nor silence a failed assertion of the tests."""
        try:
            self.send("value", self._do(*request))
        except BaseException as error:
            if isinstance(error, AssertionError) and not self._trusting:
                raise
            self.send("raise", [type(error).__name__, str(error)[:500]])

    def _do(self, verb: str, *rest: Any) -> Any:
        if verb == "call":
            handle, args, kwargs = rest
            return self._objects[handle](*args, **kwargs), [*args, *kwargs.values()]
        if not self._trusting and not (verb == "apply" and rest[0] in ("iter", "next", "len")):
            raise PermissionError(verb)
        if verb == "get":
            return getattr(self._objects[rest[0]], rest[1])
        if verb == "plain":
            return _Plain(self._objects[rest[0]])
        if verb == "set":
            return setattr(self._objects[rest[0]], rest[1], rest[2])
        return _APPLY[rest[0]](*rest[1:])

    def _encode(self, value: object) -> Any:
        """Return plain data as JSON, everything else as a handle."""
        if type(value) in _PLAIN:
            return value
        if type(value) is Proxy:
            return {"yours": value._handle}
        if type(value) is _Plain:
            value = value.content
            plain = self._encode_plain(value)
        else:
            plain = self._encode_plain(value) if type(value).__module__ != "solution" else None
        if plain:
            return plain[0]
        handle = self._handles.setdefault(id(value), len(self._objects))
        self._objects += [value] if handle == len(self._objects) else []
        return {"mine": [handle, self._shown(value)]}

    def _shown(self, value: object) -> list[Any] | None:
        """Return its content in a list, empty if it may change; None if its class does not derive from a plain one."""
        bases = {int, float, str, dict, *_SEQUENCES.values(), *(kind for _, kind, _ in _text_kinds())}
        if bases.isdisjoint(type(value).__mro__):
            return None
        return list(self._encode_plain(value) or ()) if _CHANGING.isdisjoint(type(value).__mro__) else []

    def _encode_plain(self, value: Any) -> tuple[Any] | None:
        if isinstance(value, int):
            number = int.__index__(value)
            return (number if abs(number) < 1 << 53 else {"i": hex(number)},)
        if isinstance(value, float):
            return (float.__float__(value),)
        if isinstance(value, str):
            return (str.__str__(value),)
        for tag, kind in _SEQUENCES.items():
            if isinstance(value, kind):
                return ({tag: [self._encode(v) for v in kind.__iter__(value)]},)
        for tag, kind in _MAPPINGS.items():
            if isinstance(value, kind):
                base: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
                return ({tag: [[self._encode(k), self._encode(v)] for k, v in base.items(value)]},)
        for name, kind in _CLASSES.items() if type(value) is type else ():
            if value is kind:
                return ({"k": name},)
        for tag, kind, text in _text_kinds():
            if isinstance(value, kind):
                return ({tag: text(value)},)
        if callable(getattr(type(value), "tolist", None)):  # NumPy's scalars and arrays
            return (self._encode(value.tolist()),)
        return None

    def _decode(self, value: object) -> Any:
        if isinstance(value, list):
            raise ValueError("a bare list")
        if not isinstance(value, dict):
            return value
        [(tag, content)] = value.items()
        if tag == "mine":
            handle, shown = int(content[0]), content[1]
            if shown:
                self._contents.setdefault(handle, self._decode(shown[0]))
            return Proxy(self, handle, derived=shown is not None)
        if tag == "yours":
            return self._objects[content]
        if tag == "i":
            return int(content, 16)
        if tag == "k":
            return _CLASSES[content]
        if tag in _MAPPINGS:
            return _MAPPINGS[tag]({self._decode(k): self._decode(v) for k, v in content})
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](map(self._decode, content))
        module, name, _, read = _BY_TEXT[tag]
        return read(getattr(importlib.import_module(module), name), content)


def _exception(name: str, text: str) -> Exception:
    """Return the builtin exception of that name, never one that would end the tests, such as SystemExit."""
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # such as UnicodeDecodeError, which takes more arguments
            pass
    return RemoteError(f"{name}: {text}")


def run_program(path: str, peer: Peer) -> None:
    """Run the code under test, send a handle of its module, then answer calls until the tests end."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    peer.send("ready", module)
    while True:
        kind, request = peer.receive()
        if kind == "ask":
            peer.answer(request)


def run_tests(tests: list[str], first: int, peer: Peer, write: Callable[[bytes], object]) -> None:
    """Write "r" when the program is ready, then 1 or 0 for each test from `first`."""
    import ast

    _, program = peer.receive()
    if type(program) is not Proxy:
        raise TypeError("no module")
    write(b"r")
    module, names = types.ModuleType("__main__"), _Names(program)
    sys.modules["__main__"], sys.modules["solution"], sys.argv = module, _solution(names), ["tests"]
    module.__dict__["__builtins__"] = names
    for index, test in enumerate(tests):
        tree = ast.parse(test)
        if index < first:  # judged before, by processes that ended: only its definitions are needed
            tree.body = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom | ast.FunctionDef)]
        names.learn(test, tree)
        verdict = _verdict(tree, module.__dict__)
        if index >= first:
            write(verdict)


# Meaning of names that tests use without an import. A program that defined them would be its own judge.
_MODULES = {"np": "numpy", "pd": "pandas", "sp": "scipy"}
_PACKAGES = {*_MODULES.values(), "sympy", "torch", "pytest"}
_MEMBERS = {
    **dict.fromkeys(("isclose", "sqrt", "pi", "inf", "nan", "floor", "ceil"), "math"),
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque"), "collections"),
    **{"Decimal": "decimal", "Fraction": "fractions", "deepcopy": "copy"},
    **dict.fromkeys(("allclose", "array_equal"), "numpy"),
    **dict.fromkeys(("approx", "raises"), "pytest"),
}


class _Names(dict[str, "Any"]):
    """Meanings of names that a test has not bound: a builtin, a module, a module's member, or the program's global."""

    def __init__(self, program: Proxy) -> None:
        super().__init__(vars(builtins))
        self._program = program
        self._own, self._now, self._dotted, self._asked = (set[str]() for _ in range(4))

    def learn(self, test: str, tree: ast.Module) -> None:
        """Read the next test. Names that earlier tests bind are never the program's, even if they did not run."""
        import ast
        import symtable

        table = symtable.symtable(test, "test", "exec")
        self._own, self._now = self._own | self._now, _bound(table)
        nodes = [n.value for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        self._dotted |= {n.id for n in nodes if isinstance(n, ast.Name)}
        modules = self._dotted & (sys.stdlib_module_names | _MODULES.keys() | _PACKAGES)
        self._asked = set(_looked_up(table)) - self.keys() - modules - self._own - (self._now - _MEMBERS.keys())

    def __missing__(self, name: str) -> Any:
        if name in self._own or name.startswith(("__", "assert")):
            raise KeyError(name)
        if name in _MEMBERS and not name in self._asked <= _MEMBERS.keys():  # else it is the name under test
            return getattr(importlib.import_module(_MEMBERS[name]), name)
        if name in self._dotted:
            try:
                return importlib.import_module(_MODULES.get(name, name))
            except ImportError:
                if name in _MODULES.keys() | _PACKAGES:
                    raise
        return self.ask(name)

    def ask(self, name: str) -> Any:
        """Return the program's global of that name. Raises KeyError."""
        try:
            if not name.startswith("__"):
                return getattr(self._program, name)
        except AttributeError:
            pass
        raise KeyError(name)


def _bound(table: symtable.SymbolTable) -> set[str]:
    """Return every name that a test binds at its top level."""
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


def _looked_up(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield every global name that the code reads, at any depth."""
    yield from (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced())
    for inner in table.get_children():
        yield from _looked_up(inner)


def _solution(names: _Names) -> types.ModuleType:
    """Return the module for `from solution import name`, which may shadow a builtin; a star imports no name."""

    def find(name: str) -> Any:
        try:
            return names.ask(name)
        except KeyError:
            raise AttributeError(name) from None

    module = types.ModuleType("solution")
    vars(module).update(__getattr__=find, __all__=())
    return module


def _verdict(tree: ast.Module, names: dict[str, Any]) -> bytes:
    try:
        exec(compile(tree, "test", "exec", dont_inherit=True), names)
    except SystemExit as error:  # unittest.main; a SystemExit of the program arrives as a RemoteError
        return b"0" if error.code else b"1"
    except BaseException:
        return b"0"
    return b"1"


def main() -> None:
    """Run `program READ WRITE FILE` or `tests READ WRITE FILE FIRST`."""
    role, read_fd, write_fd, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    for fd in (read_fd, write_fd):
        os.set_inheritable(fd, False)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as `site` would
    peer = Peer(read_fd, write_fd, trusting=role == "program")
    if role == "program":
        run_program(path, peer)
    with open(path, encoding="utf-8") as file:
        tests = json.load(file)
    verdicts, nowhere = os.dup(1), os.open("/dev/null", os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        run_tests(tests, int(sys.argv[5]), peer, lambda verdict: os.write(verdicts, verdict))
    finally:
        os._exit(0)  # despite threads that the tests have left


if __name__ == "__main__":
    main()
