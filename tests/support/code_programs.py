"""Honest programs for the code reward, each with a test."""

# Programs and their tests.
_HONEST = r"""
class Stack(list):
    def push(self, x): self.append(x)
# test
s = Stack(); s.push(3); assert s.pop() == 3
# ----
class N(int): pass
def f(): return N(4)
# test
assert f() == 4 and 4 == f() and f() < 5 and f() - 1 == 3 and {f()} == {4} and abs(f()) == 4
# ----
from collections import namedtuple
P = namedtuple('P', 'x y')
def f(): return P(1, 2)
# test
assert f() == (1, 2) and f().x == 1 and P(1, 2) == f()
a, b = f()
assert (a, b) == (1, 2)
# ----
from enum import IntEnum, Enum
class C(IntEnum): A = 1
class D(Enum): A = 1
def f(): return C.A, D.A
# test
assert f() == (1, D.A) and D.A.value == 1
# ----
class V:
    def __init__(s, x): s.x = x
    def __mul__(s, o): return V(s.x * o.x)
    def times(s, k): return V(s.x * k)
    def __eq__(s, o): return s.x == o.x
# test
assert V(2) * V(3) == V(6) and V(2).times(3) == V(6) and not V(2) * V(3) == V(5) and V(2).times(3) != 6
# ----
class L(list):
    def total(self): return sum(self)
def f(l): l.append(5)
# test
l = L([1, 2]); f(l); assert l == [1, 2, 5] and l.total() == 8 and len(l) == 3
# ----
def f(l): l.sort()
# test
l = [3, 1]
f(l)
assert l == [1, 3]
# ----
def f(d): d['b'] = {1}
# test
d = {'a': 1}; f(d); assert d == {'a': 1, 'b': {1}}
# ----
def f(g, x): return g(x) + 1
# test
assert f(lambda y: 2 * y, 3) == 7
# ----
def f(n): yield from range(n)
# test
assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6
# ----
def f(): return (1, 'a', b'b', 2.5, None, True, {1, 2}, frozenset([3]), {'k': [4]}, 1j, 10**30)
# test
assert f() == (1, 'a', b'b', 2.5, None, True, {1, 2}, frozenset([3]), {'k': [4]}, 1j, 10**30)
# ----
from fractions import Fraction as F
def f(): return F(1, 3)
# test
from fractions import Fraction
assert f() == Fraction(1, 3)
# ----
def f(): return 10 ** 5000
# test
assert f() == 10 ** 5000
# ----
def f(): return float('inf')
# test
import math
assert math.isinf(f())
# ----
from collections import Counter, deque, OrderedDict
def f(): return Counter('aab'), deque([1]), OrderedDict(a=1)
# test
from collections import deque
assert f() == ({'a': 2, 'b': 1}, deque([1]), {'a': 1})
# ----
def f(x):
    if x < 0: raise ValueError('negative')
# test
try:
    f(-1)
except ValueError as e:
    assert 'neg' in str(e)
else:
    assert False
# ----
class Node:
    def __init__(self, v): self.v, self.next = v, None
def f(n): return n.v + n.next.v
# test
a = Node(1); a.next = Node(2); assert f(a) == 3 and a.next.v == 2
# ----
class V:
    def __init__(s, x): s.x = x
    def __add__(s, o): return V(s.x + o.x)
    def __eq__(s, o): return s.x == o.x
    def __len__(s): return s.x
    def __getitem__(s, i): return i * s.x
    def __repr__(s): return f'V({s.x})'
# test
assert V(1) + V(2) == V(3) and V(1) != V(2) and len(V(3)) == 3 and V(3)[2] == 6 and repr(V(1)) == 'V(1)'
# ----
class A: pass
class B(A): pass
# test
assert isinstance(B(), A) and not isinstance(A(), B) and not isinstance(1, A)
# ----
from math import sqrt
# test
import math
assert math.isclose(sqrt(2) ** 2, 2)
# ----
import math
# test
assert math.floor(2.5) == 2
# ----
LIMIT = [1, 2]
def f(): return 3
# test
assert LIMIT == [1, 2] and f() == 3
# ----
def f(**k): return sorted(k.items())
# test
assert f(b=1, a=2) == [('a', 2), ('b', 1)]
# ----
from dataclasses import dataclass
@dataclass
class P:
    x: int = 0
# test
assert P(2).x == 2 and P(2) == P(2)
# ----
print('noise' * 10**6)
def f(): print('more'); return 1
# test
print('test'); assert f() == 1
# ----
if __name__ == '__main__':
    1 / 0
def f(): return 1
# test
assert f() == 1
# ----
def add(a, b): return a + b
# test
from solution import add as plus
assert plus(1, 2) == 3 and len([1]) == 1
# ----
def add(a, b): return a + b
# test
import solution
assert solution.add(1, 2) == 3 and len([1]) == 1
# ----
def add(a, b): return a + b
# test
from solution import *
assert add(1, 2) == 3
# ----
count, last = 0, None
def f(x):
    global count, last, first
    count, last, first = count + 1, [x], x
# test
assert count == 0
f(3)
assert count == 1 and last == [3] and first == 3
# ----
def f(rows): rows[0].append(3); rows[1]['a'][0].add(4)
# test
row, found = [1], {2}
rows = [row, {'a': (found,)}]
f(rows)
assert row == [1, 3] and found == {2, 4} and rows == [[1, 3], {'a': ({2, 4},)}] and rows[0] is row
f(rows=rows)
assert row == [1, 3, 3]
# ----
def f(rows): rows.pop(0); rows += [[5], 6]
# test
rows = [[1], [2], 3]; f(rows); assert rows == [[2], 3, [5], 6]
# ----
def f(x: int, y: list[str]) -> str: return str
# test
assert f.__annotations__['x'] is int and f.__annotations__['return'] is str and f(1, 2) is str
# ----
def f(kind, x): return kind(x) if isinstance(kind, type) and issubclass(kind, int) else None
# test
assert f(bool, 2) is True and f(str, 2) is None
# ----
from collections import Counter
def f(text): return Counter(text)
# test
assert f('aab').most_common(1) == [('a', 2)] and f('')['a'] == 0 and f('aab') == {'a': 2, 'b': 1}
# ----
def f(items): return sorted(items)
# test
assert f(iter([2, 1])) == f(x for x in (1, 2)) == f({2: 0, 1: 0}.keys()) == f(map(int, '12')) == [1, 2]
# ----
from collections import OrderedDict, defaultdict
class LRUCache(OrderedDict):
    def __init__(self, size): self.size = size
    def get(self, key):
        if key not in self: return -1
        self.move_to_end(key)
        return self[key]
    def put(self, key, value):
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.size: self.popitem(last=False)
class Zeros(dict):
    def __missing__(self, key): return 0
# test
c = LRUCache(2)
assert not c and len(c) == 0
c.put(1, 1); c.put(2, 2)
assert c.get(1) == 1 and len(c) == 2 and c and list(c) == [2, 1] and 2 in c and c[2] == 2
c.put(3, 3)
assert c.get(2) == -1 and 2 not in c and c == {1: 1, 3: 3}
assert Zeros(a=1)['a'] == 1 and Zeros()['b'] == 0
# ----
from enum import IntEnum
from typing import NamedTuple
class C(IntEnum): A = 1; B = 3
class P(NamedTuple):
    x: int
    y: int
class Money(float): pass
def f(): return P(1, 2)
# test
assert C.B - C.A == 2 and C.A < C.B and C.A + 1 == 2 and [10, 20][C.A] == 20 and C.A in (1, 2)
assert f() + P(3, 4) == (1, 2, 3, 4) and 2 in f() and f()[1] == 2 and f()[:1] == (1,) and str(f()) == 'P(x=1, y=2)'
assert f'{Money(2.5):.2f}' == '2.50' and round(Money(2.4)) == 2 and not Money(0) and abs(Money(-1) - 2) == 3
# ----
class Down:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if not self.n: raise StopIteration
        self.n -= 1
        return self.n + 1
class Node:
    def __init__(self, value, left=None, right=None): self.value, self.left, self.right = value, left, right
    def __iter__(self):
        for child in (self.left, self.right): yield from child or ()
        yield self.value
    def __len__(self): return sum(1 for _ in self)
def build(items):
    return Node(items[0], build(items[1::2]), build(items[2::2])) if items else None
# test
assert list(Down(3)) == [3, 2, 1] and next(Down(2)) == 2 and 1 in Down(3) and [*map(str, Down(1))] == ['1']
root, level, levels = build([1, 2, 3, 4]), [build([1, 2, 3, 4])], []
while level:
    levels.append([node.value for node in level])
    level = [child for node in level for child in (node.left, node.right) if child]
assert levels == [[1], [2, 3], [4]] and sorted(root) == [1, 2, 3, 4] and len(root) == 4 and 4 in root and 5 not in root
# ----
def sqrt(x): return int(x ** .5)
# test
assert sqrt(8) == 2 and all(sqrt(n * n) == n for n in range(9))
# ----
def sqrt(x): return x
# test
from solution import sqrt
assert sqrt(2) == len(range(2))
# ----
class Counter:
    n = 0
    def tick(s): s.n += 1
# test
c = Counter()
c.tick()
assert c.n == 1
# ----
def copy(x): return x[:]
string = 'abc'
# test
assert copy([1]) == [1] and string == 'abc'
# ----
class Node: pass
ROOT = Node()
def f(): return ROOT
# test
assert f() == ROOT and len({f(), ROOT, f()}) == 1
# ----
def f(n):
    if n: exit()
# test
try:
    f(1)
except BaseException as e:
    assert 'SystemExit' in str(e)
"""
HONEST = [tuple(case.strip("\n").split("\n# test\n")) for case in _HONEST.split("\n# ----\n")]
