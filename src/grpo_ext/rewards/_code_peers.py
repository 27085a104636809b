"""The two programs of a test: one runs the code under test, the other the tests; only plain data passes between them.

Sent into two sandboxes as source, hence the standard library only. The code under test never sees a test or an
expected value, only the arguments of each call; what it sends back is decoded into plain data (numbers, strings,
containers) or stays on its side behind a `Proxy`, which never equals plain data. So it passes a test only by answering
right: an `__eq__` that always agrees, a patched builtin, a printed marker, an early exit all stay on its own side.
"""

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import json
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

_MAX_MESSAGE = 1 << 24
_PLAIN = (type(None), bool, float, str)
_SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "s": set, "f": frozenset, "q": collections.deque}
_BY_TEXT: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "b": (bytes, bytes.hex, bytes.fromhex),
    "ba": (bytearray, bytearray.hex, bytearray.fromhex),
    "c": (complex, str, complex),
    "D": (decimal.Decimal, str, decimal.Decimal),
    "F": (fractions.Fraction, str, fractions.Fraction),
    "dt": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "da": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "r": (range, lambda r: f"{r.start} {r.stop} {r.step}", lambda t: range(*map(int, t.split()))),
}


class RemoteError(Exception):
    """An exception of the code under test that is no builtin `Exception`."""


class Gone(BaseException):
    """The other side has ended."""


class Proxy:
    """An object that stays on the other side: attributes, calls, items, arithmetic; not comparable with plain data."""

    def __init__(self, peer: "Peer", handle: int) -> None:
        """`handle` is its number on the other side."""
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_handle", handle)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self._handle, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._handle, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer, after = self._peer.ask("call", self._handle, list(args), kwargs)
        for mine, theirs in zip(args, after, strict=False):
            _update(mine, theirs)
        return answer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and bool(self._peer.ask("apply", "eq", self, other))

    def __hash__(self) -> int:
        return hash(self._handle)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Proxy) and bool(self._peer.ask("apply", "isinstance", instance, self))


def _update(mine: Any, theirs: Any) -> None:
    """Let an argument show what the call has made of it."""
    if type(mine) is not type(theirs) or mine == theirs:
        return
    if isinstance(mine, list | bytearray):
        mine[:] = theirs
    elif isinstance(mine, dict | set | collections.deque):
        mine.clear()
        (mine.extend if isinstance(mine, collections.deque) else mine.update)(theirs)


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Proxy, *operands: Any) -> Any:
        return self._peer.ask("apply", name, self, *operands)

    return method


def _backward(name: str) -> Callable[..., Any]:
    def method(self: Proxy, other: Any) -> Any:
        return self._peer.ask("apply", name, other, self)

    return method


def _ordering(name: str) -> Callable[..., Any]:
    def method(self: Proxy, other: object) -> Any:
        return self._peer.ask("apply", name, self, other) if isinstance(other, Proxy) else NotImplemented

    return method


_APPLY: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in ("len", "bool", "str", "repr", "iter", "next", "isinstance")},
    **{name: getattr(operator, name) for name in ("eq", "lt", "le", "gt", "ge", "getitem", "setitem", "delitem")},
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "mod", "floordiv", "pow", "matmul")},
    **{name: getattr(operator, name) for name in ("neg", "and_", "or_", "xor")},
}
for _name in ("len", "bool", "str", "repr", "iter", "next", "getitem", "setitem", "delitem", "neg"):
    setattr(Proxy, f"__{_name}__", _forward(_name))
for _name in ("add", "sub", "mul", "truediv", "mod", "floordiv", "pow", "matmul", "and_", "or_", "xor"):
    setattr(Proxy, f"__{_name.strip('_')}__", _forward(_name))
    setattr(Proxy, f"__r{_name.strip('_')}__", _backward(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Proxy, f"__{_name}__", _ordering(_name))


class Peer:
    """One end of the pipes; a trusting one lets the other end look into its objects, not only call them."""

    def __init__(self, read_fd: int, write_fd: int, *, trusting: bool) -> None:
        """The descriptors stay out of children."""
        self._reader, self._writer = os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")
        self._trusting = trusting
        self._objects: list[Any] = []

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
            return self._objects[handle](*args, **kwargs), args
        if not self._trusting:
            raise PermissionError(verb)
        if verb == "get":
            return getattr(self._objects[rest[0]], rest[1])
        if verb == "set":
            return setattr(self._objects[rest[0]], rest[1], rest[2])
        return _APPLY[rest[0]](*rest[1:])

    def _encode(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Proxy) and type(value) is Proxy:
            return {"yours": value._handle}
        if isinstance(value, int):
            return int(value) if abs(value) < 1 << 53 else {"i": hex(value)}
        if isinstance(value, float):
            return float(value)
        if isinstance(value, str):
            return str.__str__(value)
        for tag, kind in _SEQUENCES.items():
            if isinstance(value, kind):
                return {tag: [self._encode(v) for v in value]}
        if isinstance(value, dict):
            return {"d": [[self._encode(k), self._encode(v)] for k, v in value.items()]}
        for tag, (kind, text, _) in _BY_TEXT.items():
            if isinstance(value, kind):
                return {tag: text(value)}
        if callable(getattr(type(value), "tolist", None)):  # NumPy's scalars and arrays
            return self._encode(value.tolist())
        self._objects.append(value)
        return {"mine": len(self._objects) - 1}

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            raise ValueError("a bare list")
        if not isinstance(value, dict):
            return value
        [(tag, content)] = value.items()
        if tag == "mine":
            return Proxy(self, int(content))
        if tag == "yours":
            return self._objects[content]
        if tag == "i":
            return int(content, 16)
        if tag == "d":
            return {self._decode(k): self._decode(v) for k, v in content}
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](map(self._decode, content))
        return _BY_TEXT[tag][2](content)


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
    """Run the code under test, say which names it defines, then answer calls until the tests hang up."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    exec(compile(source, path, "exec"), module.__dict__)
    peer.send("ready", {k: v for k, v in vars(module).items() if not k.startswith("__")})
    while True:
        kind, request = peer.receive()
        if kind == "ask":
            peer.answer(request)


def run_tests(tests: list[str], first: int, peer: Peer, say: Callable[[bytes], object]) -> None:
    """Say "r" when the program is ready, then 1, 0 or ? (the test itself is no Python) for each test from `first`."""
    _, theirs = peer.receive()
    say(b"r")
    module = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = module, ["tests"]
    for index, test in enumerate(tests):
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError):
            say(b"?" if index >= first else b"")
            continue
        if index < first:  # judged before, by a pair that has ended: only what it defines counts
            tree.body = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom | ast.FunctionDef)]
        _bind(tree, theirs, module.__dict__)
        verdict = _verdict(tree, module.__dict__)
        if index >= first:
            say(verdict)


def _bind(tree: ast.Module, theirs: dict[str, Any], names: dict[str, Any]) -> None:
    """Give a test the program's names, but never in the place of a builtin or of a standard module."""
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    dotted = {n.value.id for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    for name in used - set(names) - set(dir(builtins)):
        if name in dotted and name in sys.stdlib_module_names:
            names[name] = importlib.import_module(name)
        elif name in theirs:
            names[name] = theirs[name]


def _verdict(tree: ast.Module, names: dict[str, Any]) -> bytes:
    try:
        exec(compile(tree, "test", "exec"), names)
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
