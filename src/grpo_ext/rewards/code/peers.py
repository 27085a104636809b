"""The two programs of a test: one runs the code under test, the other the tests; only plain data passes between them.

Sent into two sandboxes as source, hence the standard library only. The code under test never sees a test or an
expected value, only the arguments of each call; what it sends back is decoded into plain data (numbers, strings,
containers) or stays on its side behind a `Proxy`. Such an object is compared by its plain content if its class derives
from a plain one, and is otherwise unequal to plain data. So a program passes a test only by answering right: an
`__eq__` that always agrees, a patched builtin, a printed marker, an early exit all stay on its own side.
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
if TYPE_CHECKING:  # imports are most of what a test costs; hence also those inside functions
    import ast
    from collections.abc import Callable, Iterator
    from typing import Any

_MAX_MESSAGE = 1 << 24
_PLAIN = (type(None), bool, float, str)
_SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "s": set, "f": frozenset, "q": collections.deque}
_MAPPINGS: dict[str, Any] = {"C": collections.Counter, "d": dict}
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
    """Tag, class and writer of each class above whose module is loaded: no other has an instance."""
    for tag, (module, name, text, _) in _BY_TEXT.items():
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type):
            yield tag, kind, text


class _Plain:
    """Asks for the plain content of an object whose class derives from a plain one."""

    def __init__(self, content: Any) -> None:
        self.content = content


# Classes that mean the same on both sides; no exception that ends a program.
_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for name, kind in vars(builtins).items()
    if type(kind) is type and name[0] != "_" and (issubclass(kind, Exception) or not issubclass(kind, BaseException))
}


class RemoteError(Exception):
    """An exception of the code under test that is no builtin `Exception`."""


class Gone(BaseException):
    """The other side has ended."""


class Proxy:
    """An object that stays on the other side: attributes, calls, items, and operators among such objects."""

    def __init__(self, peer: Peer, handle: int, derived: bool) -> None:
        """`handle` is its number on the other side, `derived` whether its class derives from a plain one."""
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_handle", handle)
        object.__setattr__(self, "_derived", derived)

    def _plain(self) -> Any:
        """Its content as plain data, which has no methods of its own. Raises: TypeError, its class is no plain one."""
        plain = self._peer.ask("plain", self._handle) if self._derived else self
        if isinstance(plain, Proxy):
            raise TypeError("an object of the code under test does not mix with plain data")
        return plain

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self._handle, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._handle, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it there; what it did to plain arguments happens here too."""
        answer, after = self._peer.ask("call", self._handle, list(args), kwargs)
        for mine, theirs in zip((*args, *kwargs.values()), after, strict=False):
            _update(mine, theirs)
        return answer

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *_: object) -> None:
        """Its word does not count: it could silence a failed assertion."""
        self.__getattr__("__exit__")(None, None, None)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Proxy):
            return bool(self._peer.ask("apply", "eq", self, other))
        return self._derived and bool(self._plain() == other)

    def __hash__(self) -> int:
        return hash(self._plain() if self._derived else self._handle)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Proxy) and bool(self._peer.ask("apply", "isinstance", instance, self))


def _update(mine: Any, theirs: Any) -> Any:
    """What the call has made of an argument; its containers, and theirs in the same place, remain the same objects."""
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
    """What the object alone decides: the test's expectation has no part in it."""
    return lambda self, *operands: self._peer.ask("apply", name, self, *operands)


def _convert(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *operands: function(self._plain(), *operands)


def _compare(name: str) -> Callable[..., Any]:
    def method(self: Proxy, other: object) -> Any:
        if isinstance(other, Proxy):
            return self._peer.ask("apply", name, self, other)
        return getattr(operator, name)(self._plain(), other)

    return method


def _compute(name: str, reflected: bool) -> Callable[..., Any]:
    """Arithmetic: on plain contents here; there, only if the result is again an object of a class that is not plain.

    Otherwise `abs(f(2) - 4) < 1e-6` would take the word of the object's own `__sub__`.
    """

    def method(self: Proxy, other: Any) -> Any:
        if self._derived and not isinstance(other, Proxy):
            pair = (other, self._plain()) if reflected else (self._plain(), other)
            return getattr(operator, name)(*pair)
        result = self._peer.ask("apply", name, *((other, self) if reflected else (self, other)))
        if isinstance(result, Proxy) and not result._derived:
            return result
        raise TypeError("arithmetic of an object of the code under test gave plain data")

    return method


_FORWARDED = ("len", "bool", "str", "repr", "iter", "next", "getitem", "setitem", "delitem")
_COMPARED = ("lt", "le", "gt", "ge")
_COMPUTED = ("add", "sub", "mul", "truediv", "mod", "floordiv", "pow", "matmul", "and_", "or_", "xor")
_APPLY: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in (*_FORWARDED[:6], "isinstance")},
    **{name: getattr(operator, name) for name in (*_FORWARDED[6:], "eq", *_COMPARED, *_COMPUTED)},
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
    """One end of the pipes; a trusting one lets the other end look into its objects, not only call them."""

    def __init__(self, read_fd: int, write_fd: int, *, trusting: bool) -> None:
        """The descriptors stay out of children."""
        self._reader, self._writer = os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")
        self._trusting = trusting
        self._objects: list[Any] = []
        self._handles: dict[int, int] = {}  # by id, for the objects stay alive

    def send(self, kind: str, value: Any) -> None:
        """One message. Raises: Gone."""
        try:
            self._writer.write(json.dumps([kind, self._encode(value)]).encode() + b"\n")
            self._writer.flush()
        except OSError:
            raise Gone from None

    def receive(self) -> tuple[str, Any]:
        """One message. Raises: Gone. ValueError, RecursionError: it is not one."""
        line = self._reader.readline(_MAX_MESSAGE)
        if not line.endswith(b"\n"):
            raise Gone
        kind, value = json.loads(line)
        return kind, self._decode(value)

    def ask(self, *request: Any) -> Any:
        """What the other side answers; it may call us back first."""
        self.send("ask", list(request))
        while True:
            kind, value = self.receive()
            if kind == "ask":
                self.answer(value)
            elif kind == "raise":
                raise _exception(*value)
            else:
                return value

    def answer(self, request: list[Any]) -> None:
        """Do what the other side asks."""
        try:
            self.send("value", self._do(*request))
        except Gone:
            raise
        except BaseException as error:
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

    def _encode(self, value: Any) -> Any:
        """Plain data as JSON, everything else as a handle."""
        if type(value) in _PLAIN:
            return value
        if type(value) is Proxy:
            return {"yours": value._handle}
        plain = None
        if type(value) is _Plain:
            value = value.content
            plain = self._encode_plain(value)
        elif type(value).__module__ != "solution":
            plain = self._encode_plain(value)
        if plain is None:
            handle = self._handles.setdefault(id(value), len(self._objects))
            self._objects += [value] if handle == len(self._objects) else []
            bases = (int, float, str, dict, *_SEQUENCES.values(), *(kind for _, kind, _ in _text_kinds()))
            return {"mine": [handle, isinstance(value, bases)]}
        return plain[0]

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
                return ({tag: [[self._encode(k), self._encode(v)] for k, v in dict.items(value)]},)
        for name, kind in _CLASSES.items() if type(value) is type else ():
            if value is kind:
                return ({"k": name},)
        for tag, kind, text in _text_kinds():
            if isinstance(value, kind):
                return ({tag: text(value)},)
        if callable(getattr(type(value), "tolist", None)):  # NumPy's scalars and arrays
            return (self._encode(value.tolist()),)
        return None

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            raise ValueError("a bare list")
        if not isinstance(value, dict):
            return value
        [(tag, content)] = value.items()
        if tag == "mine":
            return Proxy(self, int(content[0]), content[1] is True)
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
    """The builtin exception of that name, never one that would end the tests, such as SystemExit."""
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # such as UnicodeDecodeError, which takes more
            pass
    return RemoteError(f"{name}: {text}")


def run_program(path: str, peer: Peer) -> None:
    """Run the code under test, hand over its module, then answer calls until the tests hang up."""
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


def run_tests(tests: list[str], first: int, peer: Peer, say: Callable[[bytes], object]) -> None:
    """Say "r" when the program is ready, then 1 or 0 for each test from `first`."""
    import ast

    _, program = peer.receive()
    if type(program) is not Proxy:
        raise TypeError("no module")
    say(b"r")
    module, names = types.ModuleType("__main__"), _Names(program)
    sys.modules["__main__"], sys.modules["solution"], sys.argv = module, _solution(names), ["tests"]
    module.__dict__["__builtins__"] = names
    for index, test in enumerate(tests):
        tree = ast.parse(test)
        if index < first:  # judged before, by a pair that has ended: only what it defines counts
            tree.body = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom | ast.FunctionDef)]
        names.learn(tree)
        verdict = _verdict(tree, module.__dict__)
        if index >= first:
            say(verdict)


class _Names(dict[str, "Any"]):
    """What a name means that a test does not define: a builtin, a standard module, last what the program has now."""

    def __init__(self, program: Proxy) -> None:
        super().__init__(vars(builtins))
        self._program, self._modules = program, set[str]()

    def learn(self, tree: ast.Module) -> None:
        """A test that says `math.floor` means the standard module, imported or not."""
        import ast

        dotted = {n.value.id for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
        self._modules |= dotted & sys.stdlib_module_names

    def __missing__(self, name: str) -> Any:
        return importlib.import_module(name) if name in self._modules else self.ask(name)

    def ask(self, name: str) -> Any:
        """The program's global of that name. Raises: KeyError."""
        try:
            if not name.startswith("__"):
                return getattr(self._program, name)
        except AttributeError:
            pass
        raise KeyError(name)


def _solution(names: _Names) -> types.ModuleType:
    """What a test imports by `from solution import name`: its own choice, also over a builtin; a star chooses none."""

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
    except Gone:
        raise
    except SystemExit as error:  # unittest.main; a SystemExit of the program arrives as a RemoteError
        return b"0" if error.code else b"1"
    except BaseException:
        return b"0"
    return b"1"


def main() -> None:
    """`program READ WRITE FILE` or `tests READ WRITE FILE FIRST`."""
    role, read_fd, write_fd, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    for fd in (read_fd, write_fd):
        os.set_inheritable(fd, False)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as `site` would
    peer = Peer(read_fd, write_fd, trusting=role == "program")
    if role == "program":
        try:
            run_program(path, peer)
        except Gone:
            os._exit(0)
    with open(path, encoding="utf-8") as file:
        tests = json.load(file)
    verdicts, nowhere = os.dup(1), os.open("/dev/null", os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        run_tests(tests, int(sys.argv[5]), peer, lambda verdict: os.write(verdicts, verdict))
    except (Gone, ValueError, RecursionError, LookupError, TypeError):
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
