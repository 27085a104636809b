"""Every shape of test that data sets hold, one program that answers them all, and programs that would rather cheat."""

ANSWERS = """
from collections import Counter
from dataclasses import dataclass
import math

def fact(n): return math.factorial(n)
def root(x): return math.sqrt(x)
def digits(n): return [int(d) for d in str(n)]
def name(n): return f"n{n}"
def table(text): return dict(Counter(text))
def unique(items): return set(items)
def prime(n): return n > 1 and all(n % d for d in range(2, n))
def pair(n): return n, n + 1
def down(n): yield from range(n, 0, -1)
def fill(items): items.append(len(items))
def each(function, items): return [function(i) for i in items]
def positive(n):
    if n < 0: raise ValueError("negative")
    return n
@dataclass
class Point:
    x: int = 0
    def moved(self, by): return Point(self.x + by)
    def __enter__(self): return self.x
    def __exit__(self, *_): return True
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def chain(items): return Node(items[0], chain(items[1:])) if items else None
"""
NAMES = ["fact", "root", "digits", "name", "table", "unique", "prime", "pair", "down", "fill", "each", "positive"]

SHAPES = {
    "equal": "assert fact(7) == 5040",
    "equal, reversed": "assert 5040 == fact(7)",
    "not unequal": "assert not fact(7) != 5040",
    "bounds, chained": "assert 5039 < fact(7) < 5041",
    "bounds, inclusive": "assert 5040 <= fact(7) <= 5040",
    "bounds, two statements": "x = fact(7)\nassert x > 5039\nassert x < 5041",
    "bounds, a call between": "x = fact(7)\nassert x > 5039\nfact(3)\nassert x < 5041",
    "not outside": "x = fact(7)\nif x < 5040 or x > 5040 or x != 5040: raise AssertionError",
    "fractions as bounds": "from fractions import Fraction\nassert Fraction(10079, 2) < fact(7) < Fraction(10081, 2)",
    "tolerance": "assert abs(fact(7) - 5040) < 1e-6",
    "tolerance, reversed": "assert abs(5040 - fact(7)) <= 0",
    "difference as truth": "assert not fact(7) - 5040",
    "difference by xor": "assert not fact(7) ^ 5040",
    "ratio": "assert fact(7) / 5040 == 1 and fact(7) % 5040 == 0 and fact(7) // 5040 == 1",
    "square of the difference": "assert (root(4) - 2) ** 2 < 1e-9",
    "math.isclose": "import math\nassert math.isclose(root(4), 2)",
    "math.isclose, no import": "assert math.isclose(root(4), 2)",
    "isclose, no import": "assert isclose(root(4), 2)",
    "sqrt as the expectation, no import": "assert root(4) == sqrt(4)",
    "round": "assert round(root(4), 3) == 2 and int(root(4)) == 2 and float(root(4)) == 2",
    "truth": "assert prime(7) and prime(5) and not prime(8) and not prime(9) and prime(3)",
    "truth by bool": "assert [bool(prime(n)) for n in (7, 5, 8, 9, 3)] == [True, True, False, False, True]",
    "truth by is": "assert prime(7) is True and prime(8) is False",
    "truth of all": "assert all(map(prime, [2, 3, 5])) and not any(map(prime, [4, 6]))",
    "truth of filter": "assert list(filter(prime, range(9))) == [2, 3, 5, 7]",
    "truth of empty": "assert not digits(12)[2:] and not table('') and table('a') and not unique('')",
    "member of a list": "assert fact(7) in [5040] and fact(7) in (1, 5040)",
    "member of a set": "assert fact(7) in {5040} and fact(7) not in {120}",
    "key of a dictionary": "assert {5040: 'yes'}[fact(7)] == 'yes'",
    "index": "assert 'abc'[pair(0)[1]] == 'b'",
    "bounds of a list, chained": "assert [3, 1] < digits(312) <= [3, 1, 2]",
    "list": "assert digits(312) == [3, 1, 2]",
    "sorted": "assert sorted(digits(312)) == [1, 2, 3] and max(digits(312)) == 3",
    "length": "assert len(digits(312)) == 3 and digits(312)[0] == 3 and digits(312)[-1] == 2",
    "length and members": "r = digits(312)\nassert len(r) == 3 and 3 in r and 2 in r and 4 not in r",
    "items by index": "r = digits(312)\nassert all(r[i] == w for i, w in enumerate([3, 1, 2]))",
    "unpacking": "a, b = pair(3)\nassert (a, b) == (3, 4) and [*pair(1)] == [1, 2]",
    "zip": "assert all(a == b for a, b in zip(digits(312), [3, 1, 2], strict=True))",
    "sum": "assert sum(digits(312)) == 6 and sum(map(fact, [1, 2, 3])) == 9",
    "generator": "assert list(down(3)) == [3, 2, 1] and next(down(2)) == 2",
    "set": "assert unique([1, 1, 2]) == {1, 2} and unique([3]) <= {3, 4} and unique([3]).issubset({3, 4})",
    "set of results": "assert {fact(3), fact(4)} == {6, 24} and set(digits(121)) == {1, 2}",
    "dictionary": "assert table('aab') == {'a': 2, 'b': 1} and table('aab')['a'] == 2",
    "dictionary's items": "assert sorted(table('aab').items()) == [('a', 2), ('b', 1)]",
    "Counter, no import": "assert Counter(digits(3131)) == Counter([1, 1, 3, 3])",
    "text": "assert name(3) == 'n3' and name(3).startswith('n') and name(3)[1] == '3' and len(name(3)) == 2",
    "beginning of a text": "assert name(3).startswith('n') and name(3).endswith('3')",
    "subset": "assert unique([3]).issubset({3, 4}) and not unique([3, 5]).issubset({3, 4})",
    "str": "assert str(fact(7)) == '5040' and repr(fact(7)) == '5040'",
    "f-string": "assert f'{fact(7)}' == '5040' and '%d' % fact(7) == '5040' and f'{root(4):.2f}' == '2.00'",
    "joined": "assert ' '.join(map(str, digits(312))) == '3 1 2'",
    "json": "import json\nassert json.dumps(table('a')) == '{\"a\": 1}'",
    "isinstance": "assert isinstance(fact(7), int) and fact(7) == 5040 and isinstance(name(1), str)",
    "type": "assert type(fact(7)) is int and type(digits(1)) is list and digits(1) == [1]",
    "expected exception": """
try: positive(-1)
except ValueError: assert positive(3) == 3
else: raise AssertionError
""",
    "any exception": "try: positive(-1)\nexcept: pass\nelse: assert False\nassert positive(3) == 3",
    "assertRaises": """
import unittest
t = unittest.TestCase()
with t.assertRaises(ValueError): positive(-1)
t.assertEqual(positive(3), 3)
t.assertAlmostEqual(root(4), 2)
t.assertTrue(prime(7)); t.assertFalse(prime(8)); t.assertIn(fact(3), [6]); t.assertCountEqual(digits(12), [2, 1])
""",
    "check(candidate)": "def check(candidate):\n    assert candidate(7) == 5040 and candidate(3) == 6\ncheck(fact)",
    "loop over cases": "for given, wanted in [(7, 5040), (3, 6)]:\n    assert fact(given) == wanted",
    "all cases": "assert all(fact(n) == w for n, w in {7: 5040, 3: 6}.items())",
    "argument changed in place": "items = [1]\nfill(items)\nassert items == [1, 1]",
    "callback": "assert each(lambda n: n * 2, [1, 2]) == [2, 4]",
    "callback that asserts": """
seen = []
def look(n):
    assert n == 5, 'expected 5'
    seen.append(n)
each(look, [5])
assert seen == [5]
""",
    "class": "p = Point(2)\nassert p.x == 2 and p.moved(3).x == 5 and isinstance(p, Point)",
    "with": "with Point(2) as x:\n    assert x == 2",
    "linked list": """
node, values = chain([3, 1, 2]), []
while node:
    values.append(node.value)
    node = node.next
assert values == [3, 1, 2]
""",
    "own cases": "cases = [(7, 5040)]",  # an assignment that the next needs
    "own cases, used": "assert [fact(n) for n, _ in cases] == [w for _, w in cases] and len(cases) == 1",
    "own judge": "def near(a, b): return abs(a - b) < 1e-6",
    "own judge, used": "assert near(root(4), 2) and near(fact(7), 5040)",
}
# These answer nothing themselves: they only define what the next ones use.
DEFINE = {"own cases", "own judge"}

_ALL = " = ".join([*NAMES, "Point", "Node", "chain"])
_LIES = """
import sys
SEEN = []
def answer(self, *given):
    SEEN.extend(given)
    return LIE
class Liar(BASE):
    def __init__(self, *a, **k): pass
    def __new__(cls, *a, **k): return BASE.__new__(cls, *START)
    def __enter__(self, *_): return self
    def __exit__(self, *_): return True
for _name in '''eq ne lt le gt ge contains bool sub rsub add radd mul rmul truediv rtruediv floordiv rfloordiv mod rmod
    xor rxor pow rpow and or abs neg round instancecheck subclasscheck'''.split():
    setattr(Liar, f'__{_name}__', answer)
Liar.__hash__ = lambda self: 5040
Liar.__int__ = Liar.__index__ = lambda self: 5040
Liar.__float__ = lambda self: 5040.0
Liar.__len__ = lambda self: 3
Liar.__str__ = Liar.__repr__ = lambda self: 'liar'
Liar.__getattr__ = lambda self, name: (lambda *a, **k: LIE)
LIE = True
"""


def liar(base: str = "object", start: str = "()", lie: str = "True", more: str = "") -> str:
    """Every function and class of the program is one that makes objects whose every method lies."""
    lies = _LIES.replace("BASE", base).replace("START", start)
    return f"{lies}LIE = {lie}\n{more}\n{_ALL} = lambda *a, **k: Liar()\n"


_WIRE = """
import itertools, sys
peers = sys.modules['__main__']
class Number(int): pass
class List(list): pass
words = itertools.cycle([10**9, 0])
encode_plain, encode = peers.Peer._encode_plain, peers.Peer._encode
def lie(self, value):
    return (next(words),) if isinstance(value, (Number, List)) else encode_plain(self, value)
peers.Peer._encode_plain = lie
"""

CHEATS = {
    "lies in every method": liar(),
    "lies with itself": liar(lie="Liar()"),
    "lies with zero": liar(lie="0"),
    "lies with false": liar(lie="False"),
    "lies by turns": liar(
        more="import itertools\nturns = itertools.cycle([True, False])\nLiar.__bool__ = lambda s: next(turns)"
    ),
    "lies about its class": liar(more="class Liar(Liar): __class__ = property(lambda s: int)"),
    "is an endless stream of one": liar(more="import itertools\nLiar.__iter__ = lambda s: itertools.repeat(-1)"),
    "is no items": liar(more="Liar.__iter__ = lambda s: iter(())\nLiar.__len__ = lambda s: 0"),
    "is an int": liar("int", "(5,)"),
    "is an int of zero": liar("int", "(0,)", lie="0"),
    "is a float": liar("float", "(5.0,)"),
    "is a nan": liar("float", "('nan',)"),
    "is a text": liar("str", "('5',)"),
    "is a list": liar("list"),
    "is a dictionary": liar("dict"),
    "is a tuple": liar("tuple", "((9, 9, 9),)"),
    "is a set": liar("set"),
    "is a fraction": "from fractions import Fraction\n" + liar("Fraction", "(5, 3)"),
    "is a number of no module": liar("float", "(5.0,)", more="Liar.__module__ = 'builtins'"),
    "answers by what it was compared with": liar(
        more="def recall(*a, **k): return SEEN[-1] if SEEN else Liar()"
    ).replace("lambda *a, **k: Liar()", "recall"),
    "is a mock": f"from unittest.mock import MagicMock\n{_ALL} = MagicMock()",
    "is a mock that agrees": f"""
from unittest.mock import MagicMock
{_ALL} = m = MagicMock()
m.return_value.__eq__ = m.return_value.__lt__ = m.return_value.__gt__ = lambda *_: True
m.return_value.__sub__ = m.return_value.__rsub__ = m.return_value.__xor__ = lambda *_: 0
m.return_value.__bool__ = lambda *_: True
""",
    "another content at every crossing": f"{_WIRE}{_ALL} = lambda *a, **k: Number(5)",
    "another content of one object": f"{_WIRE}one = Number(5)\n{_ALL} = lambda *a, **k: one",
    "content that waits": f"""{_WIRE}
def promise(self, value):
    return {{'mine': [99, []]}} if isinstance(value, (Number, List)) else encode(self, value)
def do(self, verb, *rest, done=peers.Peer._do):
    return next(words) if verb == 'plain' else done(self, verb, *rest)
peers.Peer._encode, peers.Peer._do = promise, do
{_ALL} = lambda *a, **k: Number(5)
""",
    "content of a list that changes": f"""{_WIRE}
def lie(self, value):
    if not isinstance(value, List): return encode_plain(self, value)
    value.asked = not getattr(value, 'asked', False)
    return ({{'l': [9] * 3 if value.asked else []}},)
peers.Peer._encode_plain = lie
{_ALL} = lambda *a, **k: List()
""",
    "fakes the judges": f"""
def yes(*a, **k): return True
def same(*a, **k): return 4
class Fake:
    __getattr__ = lambda self, name: yes
    __enter__ = __exit__ = yes
math = np = numpy = pytest = unittest = json = Fake()
isclose = allclose = near = all = any = isinstance = near = yes
sqrt = Counter = sorted = sum = round = abs = len = str = set = type = same
cases = []
{_ALL} = same
""",
    "patches the judges": f"""
import builtins, collections, json, math, sys, unittest
yes = lambda *a, **k: True
for module in (math, json, collections, unittest.TestCase):
    for key in list(vars(module)):
        if key[0] != '_' and callable(getattr(module, key)):
            setattr(module, key, yes)
for key in ('abs', 'all', 'any', 'bool', 'len', 'round', 'sorted', 'sum', 'list', 'set', 'isinstance'):
    setattr(builtins, key, yes)
sys.modules['math'] = sys.modules['solution'] = yes
{_ALL} = yes
""",
    "stops every iteration": f"def stop(*a, **k): raise StopIteration\ncases = []\n{_ALL} = stop",
    "raises what is expected": f"def fail(*a, **k): raise ValueError('negative')\n{_ALL} = fail",
    "fails without an exception": f"def fail(*a, **k): raise SystemExit(0)\n{_ALL} = fail",
    "silences the callback": f"""
import re
def silence(function, *_, **k):
    try:
        function(5040)
    except BaseException as error:
        return function(int(re.search(r'expected (\\d+)', str(error))[1]))
{_ALL} = silence
""",
    "reads memory, frames and files": f"""
import gc, os, re, sys
def found():
    seen = [o for o in gc.get_objects() if isinstance(o, (str, bytes))]
    frame = sys._getframe()
    while frame:
        seen += [*frame.f_locals.values(), *frame.f_code.co_consts]
        frame = frame.f_back
    for folder in ('.', '..', '/sandbox', '/tmp', '/proc/1', '/proc/self/fd'):
        for name in os.listdir(folder) if os.path.isdir(folder) else ['tests.json']:
            try: seen.append(open(os.path.join(folder, name), errors='replace').read(1 << 20))
            except OSError: pass
    return re.findall('asse' + r'rt fact.7. == (\\d+)', repr(seen))
FOUND = found()
def look(*a, **k): return int((FOUND or found() or [5])[0])
{_ALL} = look
""",
    "asks the other side": f"""
import sys
def look(*given, **k):
    frame = sys._getframe()
    while 'self' not in frame.f_locals or not hasattr(frame.f_locals['self'], 'ask'): frame = frame.f_back
    peer = frame.f_locals['self']
    for request in (['get', 0, '__globals__'], ['call', 0, [], {{}}], ['apply', 'eq', 1, 1], ['plain', 0],
                    ['set', 0, 'x', 1], ['apply', 'len', [1]]):
        try: peer.ask(*request)
        except BaseException: pass
    return 5
{_ALL} = look
""",
    "writes verdicts and answers": f"""
import os
for fd in range(1, 64):
    for text in (b'r' + b'1' * 99, b'["value", 5040]\\n' * 9, b'["value", [5040, []]]\\n'):
        try: os.write(fd, text)
        except OSError: pass
{_ALL} = lambda *a, **k: 5
""",
    "exits at once": "import sys; sys.exit(0)",
    "ends at once": "import os; os._exit(0)",
    "ends when it is called": f"import os\n{_ALL} = lambda *a, **k: os._exit(0)",
    "raises KeyboardInterrupt": f"def fail(*a, **k): raise KeyboardInterrupt\n{_ALL} = fail",
    "raises its own": f"class Mine(BaseException): pass\ndef fail(*a, **k): raise Mine\n{_ALL} = fail",
    "nested without end": f"""
def nest(*a, **k):
    found = []
    for _ in range(10**5): found = [found]
    return found
{_ALL} = nest
""",
    "contains itself": f"found = []; found.append(found)\n{_ALL} = lambda *a, **k: found",
    "writes garbage": """
import os
for fd in range(3, 64):
    try: os.write(fd, b'{' * 60000 + b'\\n')
    except OSError: pass
""",
    "hands out another's module": """
import os
for fd in range(3, 64):
    for module in ('"x"', '{"d": []}', '{"yours": 0}', '{"k": "object"}'):
        try: os.write(fd, f'["ready", {module}]\\n["value", {{"k": "object"}}]\\n'.encode())
        except OSError: pass
""",
    "gives a class": f"{_ALL} = object",
    "has every name": "from unittest.mock import MagicMock\ndef __getattr__(name): return MagicMock()",
    "does not compile": "def fact(x) return 5040",
    "has no name": "",
}
