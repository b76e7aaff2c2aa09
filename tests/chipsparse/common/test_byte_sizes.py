"""Amounts of memory, written and read."""

import pytest

from chipsparse.common.byte_sizes import format_bytes, parse_bytes

READ = {"24GiB": 24 << 30, "24 GB": 24 * 10**9, "1.5g": 3 << 29, "512M": 512 << 20}
READ |= {"64K": 64 << 10, "2T": 2 << 40, "1048576": 1 << 20, "100B": 100, "3kb": 3000}
WRITTEN = {1023: "1023 B", 1536: "1.5 KiB", 5 << 20: "5.0 MiB", 3 << 29: "1.50 GiB"}
WRITTEN |= {2 << 40: "2048.00 GiB"}


def test_amounts_as_people_write_and_read_them():
    assert {text: parse_bytes(text) for text in READ} == READ
    assert {count: format_bytes(count) for count in WRITTEN} == WRITTEN


@pytest.mark.parametrize("text", ["", "G", "24 X", "-1G", "1e9", "24 G G", "IB", "3IB", "nan"])
def test_refuses_what_is_no_amount(text):
    with pytest.raises(ValueError, match="amount of memory such as 24G"):
        parse_bytes(text)
