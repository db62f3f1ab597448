"""studies/optimizers.py: what it compares, and what stands in the documents."""

import json

from harness.runs import ROOT, TINY
from test_readme import DOCS

from studies import optimizers
from studies.make_results import FOLDER

QUICK = "--num-steps 10 --eval-interval 2 --seeds 2 --rounds 2 --factors 1 3 --no-amp".split()


def test_it_compares_like_with_like(tmp_path, capsys):
    files = [tmp_path / name for name in ("found.json", "found.md")]
    words = [f"--json={files[0]}", f"--markdown={files[1]}"]
    assert optimizers.main([*TINY, *QUICK, *words]) == 0
    out, found = capsys.readouterr().out, json.loads(files[0].read_text())
    assert files[1].read_text() == out
    rates = [(r["optimizer"], r["num_steps"], round(r["lr"], 4)) for r in found["rates"]]
    assert rates == [(n, s, lr) for n, s in (("adamw", 10), ("muon", 6)) for lr in (0.025, 0.075)]
    for row in found["rates"]:
        assert [step for step, _ in row["curve"]] == list(range(2, row["num_steps"] + 1, 2))
        assert row["val_loss"] == row["curve"][-1][1] < 4
    assert [t["precision"] for t in found["times"]] == ["float32"]
    assert len(found["times"][0]["step_s_all"]) == 2
    kinds = {(r["optimizer"], r["moments_dtype"], r["seed"]): r for r in found["moments"]}
    assert len(kinds) == len(found["moments"]) == 8
    for name in optimizers.OPTIMIZERS:  # the sweep's best run is one of them
        best = optimizers.best(found["rates"], name)
        assert kinds[name, "float32", 1337]["val_loss"] == best["val_loss"]
        losses = {kinds[name, dtype, 1338]["val_loss"] for dtype in optimizers.MOMENTS}
        assert len(losses) == 2 and max(losses) - min(losses) < 0.05
        assert {r["lr"] for k, r in kinds.items() if k[0] == name} == {best["lr"]}


def test_when_muon_is_where_adamw_ends():
    def row(name: str, *curve: float) -> dict:
        steps = [(10 * i, loss) for i, loss in enumerate(curve, 1)]
        return {"optimizer": name, "val_loss": curve[-1], "curve": steps}

    rates = [row("adamw", 5, 4, 3), row("adamw", 5, 4, 3.5), row("muon", 4, 4)]
    assert optimizers.steps_to_match(rates) is None
    assert optimizers.steps_to_match([*rates, row("muon", 3.1, 3, 2)]) == 20


def test_the_documents_say_what_was_found():
    found = json.loads((ROOT / FOLDER / "optimizers.json").read_text())
    text = " ".join(DOCS["evidence.md"].split())
    ends = {name: optimizers.best(found["rates"], name)["val_loss"] for name in ("adamw", "muon")}
    step = optimizers.steps_to_match(found["rates"])
    assert f"ends at a validation loss of {ends['adamw']:.4f} after 1,000 steps" in text
    assert f"is there at step {step} and ends at {ends['muon']:.4f}" in text
    for row in found["times"]:
        assert f"{row['ratio']:.2f} times" in text and f"{row['ratio'] * step / 1000:.2f}" in text
    for name in optimizers.OPTIMIZERS:
        losses = {
            dtype: [
                row["val_loss"]
                for row in found["moments"]
                if (row["optimizer"], row["moments_dtype"]) == (name, dtype)
            ]
            for dtype in optimizers.MOMENTS
        }
        means = {dtype: sum(of_seeds) / 3 for dtype, of_seeds in losses.items()}
        spread = max(losses["float32"]) - min(losses["float32"])
        assert abs(means["bfloat16"] - means["float32"]) < spread
        assert f"{spread:.3f}" in text
        assert all(f"{mean:.4f}" in text for mean in means.values())
