import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_run_one_after_the_other(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert len(names["same_draws"]) == 4 * 50 and len(names["more_draws"]) == 4 * 60
    score, head, *_ = capsys.readouterr().out.splitlines()
    assert float(score.removeprefix("LPPD ")) > -1.2 and head.split()[0] == "chain"
    assert (tmp_path / "run" / "prediction-training data.safetensors").exists()
    assert names["points"]["w"].shape == (8, 4)
