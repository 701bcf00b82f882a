"""Programming tasks written for this project (MIT): families of Python functions, classes and small programs."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from draftsmith.text.code_snippets import BUGGY, SLOW
from draftsmith.text.templates import Template, filled, slots

RECORDS = (  # what the rows are, their key, their figure
    ("orders", "customer", "amount"),
    ("flights", "airline", "delay"),
    ("books", "author", "pages"),
    ("players", "team", "score"),
    ("parcels", "city", "weight"),
    ("readings", "sensor", "celsius"),
    ("invoices", "country", "fee"),
    ("songs", "artist", "seconds"),
)
ENDINGS = (
    "",
    "",
    "",
    " Include a docstring with two examples.",
    " Add type hints.",
    " State the time complexity.",
    " Raise ValueError for input that makes no sense.",
    " Keep it under thirty lines.",
    " Show how to call it.",
)
FOLLOW_UPS = (
    "Now write three unit tests for it with pytest.",
    "Can you make it shorter without making it harder to read?",
    "Explain line by line what your code does.",
    "What happens for empty input? Fix it if it is wrong.",
    "Add logging of each step with the standard library.",
)


def code_tasks(seed: int, *, count: int) -> Iterator[tuple[str, ...]]:
    """At most `count` different tasks as user turns (see `filled`)."""
    return filled(FAMILIES, endings=ENDINGS, follow_ups=FOLLOW_UPS, seed=seed, count=count)


def _group(rng: Random) -> str:
    records, key, value = rng.choice(RECORDS)
    what = rng.choice(
        (f"total {value}", f"mean {value}", f"largest {value}", f"number of {records}", f"median {value}")
    )
    order = rng.choice((key, "that figure, largest first"))
    return (
        f"Write a Python function `summarise_{records}(rows)` that takes a list of dictionaries with the keys '{key}' "
        f"and '{value}' and returns a dictionary from each {key} to the {what}, sorted by {order}."
    )


def _top(rng: Random) -> str:
    records, key, value = rng.choice(RECORDS)
    ties = rng.choice((f"broken by {key} in alphabetical order", "kept in their original order", "all included"))
    return (
        f"Given a list of (`{key}`, `{value}`) tuples describing {records}, write a Python function that returns the "
        f"{rng.choice(('three', 'five', 'ten'))} entries with the {rng.choice(('highest', 'lowest'))} {value}; "
        f"ties are {ties}."
    )


def _csv(rng: Random) -> str:
    records, key, value = rng.choice(RECORDS)
    result = rng.choice((f"those with a {value} above the mean", f"one list for each {key}", f"them sorted by {value}"))
    broken = rng.choice(("lack a field", f"have a {value} that is not a number", "are empty"))
    return (
        f"Write a Python function that reads {records} from a CSV file with the columns {key},{value} and returns "
        f"{result}. Lines that {broken} are counted and skipped."
    )


# fmt: off
FAMILIES: tuple[Template, ...] = (
    _group,
    _top,
    _csv,
    slots(
        "Write a Python class `<> that <>.",
        ("BankAccount` with the methods deposit, withdraw and transfer", "Stopwatch` with start, stop, lap and reset",
         "Inventory` with add, remove and low_stock(threshold)", "Matrix` with __add__, __mul__ and transpose",
         "Playlist` with add, move_up, shuffle(seed) and total_length", "Polynomial` with __call__ and derivative",
         "Library` with lend, give_back and overdue(today)", "RingBuffer` with push, pop and __len__"),
        ("never leaves an invalid state", "is easy to test", "has a readable __repr__", "checks its arguments"),
    ),
    slots(
        "Write a Python function that returns the <> most common <> of a text, ignoring <>.",
        ("three", "five", "ten", "n"),
        ("words", "letters", "pairs of neighbouring words", "word endings of three letters"),
        ("case", "case and punctuation", "digits", "words shorter than four letters"),
    ),
    slots(
        "Implement <> search over a sorted list of <> in Python. It returns <>.",
        ("binary", "exponential", "interpolation", "ternary"), ("integers", "floats", "prices", "timestamps"),
        ("the index of the first match or -1", "the place where a value would go", "the number of matches"),
    ),
    slots(
        "Write <> sort in Python for a list of <>, <>. Say in a comment whether it is stable.",
        ("insertion", "merge", "heap", "selection", "shell", "quick"),
        ("integers", "names", "(name, age) pairs", "dates"), ("ascending", "descending", "ascending, with None last"),
    ),
    slots(
        "Write a Python function `<>(text)` that tells whether <>. It must handle <>.",
        ("is_valid", "check", "accepts"),
        ("its brackets (), [] and {} are balanced", "it is a valid IPv4 address", "it is a date like 2024-02-29",
         "it is an ISBN-10 with the right control digit", "it is an ISBN-13 with the right control digit",
         "it holds a letter, a digit and a sign", "it is a hexadecimal colour like #ff8800", "it is a palindrome"),
        ("the empty string", "spaces at both ends", "letters outside ASCII", "very long input"),
    ),
    slots(
        "Write a Python function that converts <> without using a library function that does it directly. <>",
        ("a decimal integer to base 7", "a Roman numeral to an integer", "an integer below 4000 to a Roman numeral",
         "a binary string to hexadecimal", "seconds to days, hours, minutes and seconds", "an integer to English words",
         "a fraction to a mixed number", "a decimal string to a fraction in lowest terms", "Celsius to three scales"),
        ("Negative input is an error.", "Add the function for the way back.", "Explain the idea in one sentence."),
    ),
    slots(
        "Write a Python function that generates the first n <> <>.",
        ("Fibonacci numbers", "primes", "rows of Pascal's triangle", "Catalan numbers", "happy numbers",
         "perfect powers", "triangular numbers that are also squares",
         "terms of the look-and-say sequence", "Hamming numbers"),
        ("iteratively", "as a generator", "with a cache", "together with their running sum", "in reverse order"),
    ),
    slots(
        "Given a grid as a list of lists of <>, write a Python function that <>.",
        ("0 and 1", "small integers", "heights"),
        ("counts the connected regions of equal cells", "rotates it by 90 degrees", "returns its cells in spiral order",
         "finds the row with the largest sum", "finds the cheapest path from the top left to the bottom right corner",
         "mirrors it along the main diagonal", "finds all cells larger than their neighbours"),
    ),
    slots(
        "A graph is given as a dictionary from each node to <>. Write a Python function that <>.",
        ("a set of neighbours", "a dictionary of neighbours and weights", "a list of its successors"),
        ("finds a shortest path between two nodes", "tells whether it has a cycle", "returns its connected components",
         "orders the nodes so that every edge points forward, if that is possible", 
         "finds the node with most neighbours",
         "counts the paths of a given length between two nodes"),
    ),
    slots(
        "Write a Python function that parses <>. A syntax error is reported with <>.",
        ("a query string such as `a=1&b=two` into a dictionary", "a line such as `name = Ada ; age = 36` into pairs",
         "an expression such as `3 * (4 - 1)` and evaluates it", "a duration such as `2h30m` into seconds",
         "a version such as `1.12.0-rc1` into a tuple that sorts rightly", "a list such as `1-3,7,9-12` into integers"),
        ("its position", "a message that says what was expected", "its position and the character found there"),
    ),
    slots(
        "Write a Python decorator that <> and <>.",
        ("measures the run time of a function", "retries a function after an exception", "caches a function's results",
         "limits how often a function may be called", "checks a function's argument types",
         "counts a function's calls"),
        ("works for methods too", "takes its settings as arguments", "keeps the function's name and docstring",
         "can be switched off by an environment variable"),
    ),
    slots(
        "Write a context manager in Python that <>. Write it <>.",
        ("changes the working folder and goes back at the end", "writes a file so that readers never see half of it",
         "sets environment variables for a while", "collects everything printed in its block",
         "logs how long its block took", "removes a temporary folder even after an error"),
        ("as a class", "with contextlib", "with an example of its use", "with a test"),
    ),
    slots(
        "Implement <> in Python with <>. Use <> inside.",
        ("a stack", "a queue", "a least-recently-used cache", "a priority queue", "a trie", "a disjoint-set forest"),
        ("the usual operations", "len() and iteration", "a size limit", "a method that copies it"),
        ("a list", "a dictionary", "linked nodes", "whatever is simplest"),
    ),
    slots(
        "Write a recursive Python function that <>, then the same <>.",
        ("flattens a nested list", "lists all subsets of a set", "lists all permutations of a string",
         "computes the depth of a nested dictionary", "solves the towers of Hanoi",
         "adds all numbers in nested JSON data",
         "counts the ways to climb n stairs by one, two or three"),
        ("with a loop", "with an explicit stack", "in a functional style", "as a generator of its steps"),
    ),
    slots(
        "Write a Python function that compares two <> and returns <>.",
        ("dictionaries", "lists of numbers", "strings", "sets of tags", "text files", "CSV files with the same header"),
        ("what only the first one has", "the differences, readable for people", "a similarity from 0 to 1",
         "the part that both have"),
    ),
    slots(
        "Write a Python function that <> in a list of <><>.",
        ("finds the longest run of equal values", "finds the contiguous part with the largest sum",
         "finds all pairs that add up to a given number", "moves all zeros to the end",
         "finds the values that occur more than once", "finds the second largest value"),
        ("integers", "numbers that may be negative", "measurements"),
        ("", " in linear time", " without changing the list", " using little extra memory"),
    ),
    slots(
        "Write a Python function that, given <>. Use only the datetime module, and <>.",
        ("a birth date, returns the age in whole years", "two dates, counts the Mondays between them",
         "a year, lists every Friday the 13th", "a date and a number of working days, returns the day that many later",
         "a date, returns the same day of the next month", "a list of dates, returns the longest gap",
         "two times of day, returns the minutes between them, past midnight if need be"),
        ("treat leap years rightly", "write down what you assume", "accept ISO strings too"),
    ),
    slots(
        "Write a small command-line program in Python that <>, with argparse and <>.",
        ("counts lines, words and characters of files", "finds duplicate files by their content",
         "renames photos by their date", "prints the largest files below a folder", "replaces tabs by spaces",
         "converts JSON lines to CSV", "shows the last lines of a growing log",
         "draws a bar chart with text characters"),
        ("a sensible exit code", "a --dry-run option", "clear error messages", "a --quiet option"),
    ),
    slots(
        "Encrypt and decrypt text with <> in Python. <>",
        ("the Caesar cipher", "the Vigenere cipher", "a rail fence of n rails", "the Atbash cipher",
         "a keyed substitution"),
        ("Letters keep their case and other characters stay as they are.", "Show that decrypting gives the text back.",
         "Add a function that tries to break it by letter frequencies."),
    ),
    slots(
        "Simulate <> in Python for n steps and return <>. Pass the random generator in as an argument.",
        ("a random walk on a grid", "rolling two dice", "a queue at a till", "a forest fire on a grid", "an elevator",
         "a coin that tends to repeat its last result"),
        ("the final state", "the history as a list", "the mean and the spread", "how often each state was seen"),
    ),
    slots("This Python code is slow:\n```python\n<>\n```\n<>", SLOW,
          ("Make it faster and explain what was slow.", "Which line costs the most? Rewrite it.",
           "Give its time complexity and a version with a better one.")),
    slots("There is a bug in this Python function:\n```python\n<>\n```\n<>", BUGGY,
          ("Find it, explain it and correct it.", "Show an input for which it fails, then correct it.",
           "Correct it and add a test that would have caught it.")),
    slots(
        "Write a Python function `<> without numpy. <>",
        ("smooth(values, size)` that returns the moving average", "rescale(values)` that maps the values to 0..1",
         "without_outliers(values, threshold)` that drops far-off values", "histogram(values, bins)` with equal bins",
         "running_max(values)` that returns the maximum so far", "kth_smallest(values, k)`", "median(values)`",
         "differences(values)` of neighbouring values", "correlation(first, second)` of two lists"),
        ("Say what it does for an empty list.", "Use no loop where a built-in function will do.",
         "Keep the input unchanged."),
    ),
    slots(
        "Write an asynchronous Python function that <>, at most <> at a time, and returns <>.",
        ("fetches a list of addresses", "reads a list of files", "runs a list of shell commands", "sends messages"),
        ("two", "three", "four", "five", "eight", "ten"),
        ("the results in the order of the list", "the successes and the failures apart", "the first success"),
    ),
    slots(
        "Write a Python function with sqlite3 that <> in a table of <>.",
        ("inserts a row unless it is there already", "finds the newest row of each group",
         "counts the rows of each month", "deletes rows older than a given day", "adds a column and fills it"),
        ("measurements", "users", "orders", "log messages", "bookings"),
    ),
    slots(
        "Write a Python function that formats <>, no line longer than <> characters.",
        ("a list of dictionaries as a text table", "a list of dictionaries as a Markdown table",
         "a long text as paragraphs", "a nested dictionary as an indented tree",
         "a list of prices with the decimal points aligned",
         "a list of file sizes in bytes with fitting units", "a list of steps as a numbered list"),
        ("40", "60", "72", "80", "100"),
    ),
)
# fmt: on
