"""The page is made of lines alone, and says how they were measured."""

from __future__ import annotations

import json

from gnomon.studies import compression_page


def test_tables_claims_and_settings(tmp_path, capsys):
    same = dict(model="m, seed 0", calibration=500, tokens=100, length=50, sequential=False, sample=0, weights=100, bytes=200)
    lines = [same | dict(method="whole", keep=1.0, losses={"a": 1.0}), same | dict(method="private", keep=0.8, losses={"a": 1.25})]
    lines[0]["lambada"] = {"items": 7, "accuracy": 0.5, "nats": 2.0}
    lines += [same | dict(method="roles", keep=0.5, tokens=60, roles={"query": {s: {"a": 1.0} for s in ("own", "input", "output")}})]
    (tmp_path / "o.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    compression_page.main(tmp_path / "o.jsonl")
    text = capsys.readouterr().out
    assert "## m\n" in text and "+0.2500" in text and "### Claims, m" in text and "one cell: no verdict" in text
    assert "### LAMBADA, last words said (%)" in text and "| 50.0 |" in text and "its first 7 passages" in text
    assert "methods: 100 tokens of each text" in text and "parts: 60 tokens" in text and "fitted to the whole model's inputs" in text
