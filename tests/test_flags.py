"""The command line: shapes by name, what was typed, near misses, and files to write to."""

import argparse

import pytest

from trainer.flags import SHAPES, build_parser, fill_in, model_config, output_folder


def parse(*argv):
    return build_parser("test", "x.pt").parse_args(argv)


# Hugging Face's model cards of gpt2, gpt2-medium, gpt2-large, gpt2-xl: 124M, 355M, 774M, 1.5B.
@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2", 124.4), ("gpt2-medium", 354.8), ("gpt2-large", 774.0), ("gpt2-xl", 1557.6)],
)
def test_a_name_stands_for_a_shape(name, millions):
    args = fill_in(parse("--model", name))
    config = model_config(args, 50257)
    C, L = config.d_model, config.n_layers
    count = (50257 + 1024) * C + L * (12 * C * C + 13 * C) + 2 * C
    assert round(count / 1e6, 1) == millions and C // config.n_heads == 64
    assert (args.seq_len, args.max_position_embeddings, args.d_ff) == (1024, 1024, 4 * C)
    assert args.tokenizer_name == "gpt2"
    assert SHAPES.keys() == {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"}


def test_a_single_flag_overrides_a_name():
    flags = "--seq-len 256 --n-layers 2 --model gpt2 --tokenizer-name byte --batch-size 3"
    args = parse(*flags.split())
    assert (args.seq_len, args.n_layers, args.tokenizer_name) == (256, 2, "byte")
    assert (args.d_model, args.n_heads, args.max_position_embeddings) == (768, 12, 1024)
    assert parse("--model", "gpt2", "--use-toy-data").tokenizer_name is None


def test_typed_flags_are_known_even_where_they_say_the_default():
    assert parse().typed == set()
    assert parse("--batch-size", "12", "--no-compile").typed == {"batch_size", "compile"}
    assert parse("--model", "gpt2").typed == {"model", "n_layers", "n_heads", "d_model"}
    assert parse("--compile").compile and not parse().compile and not parse("--no-compile").compile


def test_a_folder_to_write_to_may_be_a_new_one(tmp_path):
    assert output_folder(str(tmp_path / "new" / "er")) == tmp_path / "new" / "er"
    assert not list(tmp_path.iterdir())  # nothing is made before all flags are known to be good
    (tmp_path / "file").touch()
    with pytest.raises(argparse.ArgumentTypeError, match="file is a file, no folder"):
        output_folder(str(tmp_path / "file" / "new"))
