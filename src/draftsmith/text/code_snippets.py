"""Short pieces of Python that code prompts ask to speed up or to correct, written for this project (MIT)."""

from __future__ import annotations

SLOW = (
    "def common(a, b):\n    return [x for x in a if x in b]",
    "def join(lines):\n    text = ''\n    for line in lines:\n        text = text + line\n    return text",
    "def is_prime(n):\n    return all(n % k for k in range(2, n))",
    "def count(words):\n    return {w: words.count(w) for w in words}",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)",
    "def first_unique(text):\n    for c in text:\n        if text.count(c) == 1:\n            return c",
    "def running(values):\n    return [sum(values[:i + 1]) for i in range(len(values))]",
    "def unique(xs):\n    out = []\n    for x in xs:\n        if x not in out:\n            out += [x]\n    return out",
    "def top(values, n):\n    return [sorted(values)[-i] for i in range(1, n + 1)]",
)
BUGGY = (
    "def mean(values):\n    total = 0\n    for v in values:\n        total = v\n    return total / len(values)",
    "def add(item, basket=[]):\n    basket.append(item)\n    return basket",
    "def drop_even(xs):\n    for x in xs:\n        if x % 2 == 0:\n            xs.remove(x)\n    return xs",
    "def last(values, n):\n    return values[-n:-1]",
    "def is_leap(year):\n    return year % 4 == 0 and year % 100 != 0",
    "def swap(d):\n    return {v: k for v, k in d.items()}",
    "def factorial(n):\n    return n * factorial(n - 1)",
    "def clamp(x, low, high):\n    return max(high, min(low, x))",
    "def vowels(text):\n    return sum(1 for c in text if c == 'a' or 'e' or 'i' or 'o' or 'u')",
    "def average_word(text):\n    return sum(len(w) for w in text.split(' ')) / len(text)",
)
