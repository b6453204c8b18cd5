"""A package of thirty lines with its tests, in which bugs can be put and noticed."""

from pathlib import Path

PURSE = '''"""Coins."""


def total(coins, start=0):
    found = start
    for coin in coins:
        if coin > 0:
            found += coin
    return found


def change(amount, coins):
    given = []
    for coin in sorted(coins, reverse=True):
        while amount >= coin:
            amount -= coin
            given.append(coin)
    return given if amount == 0 else None


class Purse:
    def pay(self, price, coins):
        if not coins:
            raise ValueError("no coins")
        return change(price, coins)
'''
TESTS = """import pytest
from purse import Purse, change, total


def test_total():
    assert total([1, 2, -5]) == 3


def test_total_from():
    assert total([1], start=4) == 5


def test_change():
    assert change(7, [1, 5]) == [5, 1, 1]


def test_no_change():
    assert change(3, [2]) is None


def test_no_coins():
    with pytest.raises(ValueError):
        Purse().pay(1, [])
"""


def toy_package(parent: Path) -> Path:
    """Its source folder."""
    folder = parent / "Purse"
    for name, text in {"src/purse.py": PURSE, "tests/test_purse.py": TESTS, ".gitignore": "src\n"}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
