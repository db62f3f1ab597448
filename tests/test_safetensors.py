"""trainer/safetensors.py against the format's own library, and against damage at random."""

import struct

import numpy as np
import pytest
import torch
from harness.gpt2_folder import gpt2_tensors, safetensors

from trainer.safetensors import DTYPES, read_tensors, write_tensors
from trainer.snapshot import SaveError, SnapshotError

TENSORS = {
    "a matrix": torch.arange(6, dtype=torch.float32).view(2, 3),
    "turned": torch.arange(6, dtype=torch.float64).view(2, 3).T,
    "bf16": torch.randn(3, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "a number": torch.tensor(7),
    "nothing": torch.empty(0, 4),
    "yes and no": torch.tensor([True, False, True]),
}


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS)
    found = read_tensors(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_the_library_reads_what_is_written_and_writes_what_is_read(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    tensors = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    tensors |= {str(dtype): torch.zeros(3, dtype=dtype) for dtype in DTYPES.values()}
    write_tensors(tmp_path / "ours", tensors)
    library.save_file(tensors, tmp_path / "theirs")
    for found in (library.load_file(tmp_path / "ours"), read_tensors(tmp_path / "theirs")):
        assert found.keys() == tensors.keys()
        assert all(
            found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in tensors.items()
        )


@pytest.mark.parametrize("pad", [0, 1, 3])
def test_tensors_that_begin_anywhere(tmp_path, pad):
    """Older files have headers of any length, and numbers at odd addresses."""
    tensors = gpt2_tensors()
    (tmp_path / "x").write_bytes(safetensors(tensors, pad=pad))
    found = read_tensors(tmp_path / "x")
    for name, array in tensors.items():
        assert np.array_equal(found[name].numpy(), array)


def test_any_damage_to_the_header_is_one_line_or_harmless(tmp_path):
    """A flipped bit, a cut: never another exception, never memory that is not the file's."""
    whole = safetensors({"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)})
    (length,) = struct.unpack("<Q", whole[:8])
    path, refused = tmp_path / "x", 0
    damaged = [whole[:n] for n in range(len(whole))]
    for byte in range(8 + length):
        for bit in range(8):
            changed = bytearray(whole)
            changed[byte] ^= 1 << bit
            damaged.append(bytes(changed))
    for content in damaged:
        path.write_bytes(content)
        try:
            for tensor in read_tensors(path).values():
                tensor.clone()  # every byte can be read
        except SnapshotError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1 and str(path) in str(error)
    assert refused > 0.5 * len(damaged)


def test_a_name_that_stands_twice(tmp_path):
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    text += b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + b"12")
    with pytest.raises(SnapshotError, match="overlap, or have gaps"):
        read_tensors(tmp_path / "x")


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"the one before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(SaveError, match="disk full"):
        write_tensors(path, TENSORS)
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
    assert path.read_bytes() == b"the one before"
