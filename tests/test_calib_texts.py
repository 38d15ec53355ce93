import hashlib

import pytest
from families import BOS, tiny_tokenizer

from calib.texts import Text, default_text, read_texts, token_windows
from plugins.errors import UserError


def numbered(lines: int) -> str:
    return "\n".join(f"line {number} of the text" for number in range(lines))


def test_files_are_read_with_the_hash_of_their_bytes(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("naïve\n".encode())
    (text,) = read_texts([file])
    assert (text.name, text.content) == ("a.txt", "naïve\n")
    assert text.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_without_files_the_text_is_pythons_own_documentation():
    (text,) = read_texts()
    assert text == default_text()
    assert text.name == "pydoc_data.topics" and len(text.content) > 100_000


def test_an_unreadable_text_is_named(tmp_path):
    with pytest.raises(UserError, match="missing.txt: cannot be read"):
        read_texts([tmp_path / "missing.txt"])
    (tmp_path / "binary").write_bytes(b"ab\xff\xfe")
    with pytest.raises(UserError, match=r"binary is not UTF-8 text \(byte 2\)"):
        read_texts([tmp_path / "binary"])


def test_a_short_text_is_packed_into_consecutive_windows():
    tokenizer, content = tiny_tokenizer(), numbered(40)
    windows = token_windows(tokenizer, [Text.of("t", content)], 64, 100)
    ids = tokenizer(content, add_special_tokens=False).input_ids
    assert [token for window in windows for token in window] == ids[: len(ids) // 64 * 64]


def test_windows_of_a_long_text_are_spread_over_it():
    tokenizer, content = tiny_tokenizer(), numbered(20_000)
    windows = token_windows(tokenizer, [Text.of("t", content)], 64, 5)
    starts = [content.index(tokenizer.decode(window)) / len(content) for window in windows]
    assert len(windows) == 5 and all(len(window) == 64 for window in windows)
    assert starts == pytest.approx([0, 0.2, 0.4, 0.6, 0.8], abs=0.01)


def test_texts_share_the_windows_by_their_size():
    tokenizer = tiny_tokenizer()
    texts = [Text.of("a", "a b c d " * 6000), Text.of("b", "x y z w " * 2000)]
    windows = token_windows(tokenizer, texts, 64, 8)
    from_first = sum("a" in tokenizer.decode(window) for window in windows)
    assert (len(windows), from_first) == (8, 6)


def test_windows_start_with_what_the_tokenizer_puts_first():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS)])
    for window in token_windows(tokenizer, [Text.of("t", numbered(40))], 64, 3):
        assert window[0] == BOS and BOS not in window[1:] and len(window) == 64


def test_a_text_shorter_than_a_window_gives_none():
    assert token_windows(tiny_tokenizer(), [Text.of("t", "short")], 64, 3) == []
