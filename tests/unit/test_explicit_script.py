"""`hvdtrain new --from`: what an ordinary script becomes, and what is left to the user."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdtrain.cli.command_table import main
from hvdtrain.starters.explicit_script import explicit

ADOPTED = Path(__file__).parents[1] / "ranks" / "adopted"


def fit(line: str, before: str = "") -> str:
    """Return what becomes of one line in a script."""
    script = f"import keras\n{before}{line}\n"
    return explicit(script).text.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "became"),
    [
        ("m.fit(x, y, epochs=3)", "hvdtrain.Trainer(m, global_batch_size=32).fit(x, y, epochs=3)"),
        (
            "m.fit(x, y, batch_size=8, epochs=3)",
            "hvdtrain.Trainer(m, global_batch_size=8).fit(x, y, epochs=3)",
        ),
        (
            "m.fit(x, y, epochs=3, batch_size=8)",
            "hvdtrain.Trainer(m, global_batch_size=8).fit(x, y, epochs=3)",
        ),
        (
            "m.fit(x, y, 8, 3, 0)",
            "hvdtrain.Trainer(m, global_batch_size=8).fit(x, y, epochs=3, verbose=0)",
        ),
        ("m.fit(x, y, batch_size=2 * B)", "hvdtrain.Trainer(m, global_batch_size=2 * B).fit(x, y)"),
        ("m.fit(batch_size=8, x=x, y=y)", "hvdtrain.Trainer(m, global_batch_size=8).fit(x=x, y=y)"),
        (
            "m.fit(x, y, epochs=1, validation_batch_size=4, batch_size=8)",
            "hvdtrain.Trainer(m, global_batch_size=8).fit(x, y, epochs=1)",
        ),
        (
            "h = build('ä').fit(x, y, epochs=1).history",
            "h = hvdtrain.Trainer(build('ä'), global_batch_size=32).fit(x, y, epochs=1).history",
        ),
        (
            "self.model.fit(x, y, epochs=1)",
            "hvdtrain.Trainer(self.model, global_batch_size=32).fit(x, y, epochs=1)",
        ),
        ("scaler.fit(x)", "scaler.fit(x)"),
        ("forest.fit(x, y)", "forest.fit(x, y)"),
    ],
)
def test_a_fit_becomes_a_trainers(line: str, became: str) -> None:
    assert fit(line) == became


@pytest.mark.parametrize(
    "before",
    [
        "d = tf.data.Dataset.from_tensor_slices(x).shuffle(9).batch(B).prefetch(1)\n",
        "d = make(x).map(f)\nd = d.batch(B, drop_remainder=True)\n",
        "d, v = keras.utils.image_dataset_from_directory(p, batch_size=B, subset='both')\n",
        "raw = load().batch(B)\nd = raw.map(f)\n",
        "d = Images(files, batch_size=B)\n",
        "def make(x):\n    ds = load(x)\n    ds = ds.batch(B)\n    return ds\nd = make(x)\n",
        "make = lambda x: x.batch(B)\nd = make(x)\n",
        "a = x.batch(B)\nfor d, name in [(a, 'a'), (a.map(f), 'b')]:\n    pass\n",
    ],
)
def test_the_batches_of_a_dataset(before: str) -> None:
    wanted = "hvdtrain.Trainer(m, global_batch_size=B).fit(d, epochs=1)"
    assert fit("m.fit(d, epochs=1)", f"B = 4\n{before}") == wanted


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("m.fit(d, epochs=1)", "the size of its batches is not found"),
        (
            "m.fit(x.batch(2) if a else x.batch(4), epochs=1)",
            "the size of its batches is not found",
        ),
        ("m.fit(*data, epochs=1)", "because of its *arguments"),
        ("m.fit(x, y, epochs=1, **more)", "because of its *arguments"),
        ("super().fit(x, y, epochs=1)", "where its model is used"),
        ("g = tape.gradient(loss, v)", "hvdtrain.keras.DistributedGradientTape"),
        ("m.train_on_batch(x, y)", "on each worker alone"),
        ("os.mkdir('out')", "pass exist_ok=True"),
        ("np.save('x.npy', x)", "with hvdtrain.first_rank_first()"),
    ],
)
def test_what_is_left_to_the_user(line: str, said: str) -> None:
    script = f"import keras\n{line}\n"
    found = explicit(script)
    assert found.text == script and not found.fits
    (note,) = found.notes
    assert note.line == 1 + len(line.splitlines()) and said in note.text


@pytest.mark.parametrize(
    ("line", "became"),
    [
        ("if a:\n\tm.save('m')", "if a:\n\tif hvdtrain.keras.rank() == 0:\n\t\tm.save('m')"),
        ("m.save('m')  # end", "if hvdtrain.keras.rank() == 0:\n    m.save('m')  # end"),
        ("if a: m.save('m')", None),
        ("m.save('m'); print(m)", None),
    ],
)
def test_where_a_file_is_written(line: str, became: str | None) -> None:
    script = f"import keras  # first\nm.fit(x, y, epochs=1)\n{line}\n"
    found = explicit(script)
    ast.parse(found.text)
    top, imported = found.text.splitlines()[:2]
    assert (top, imported) == ("import keras  # first", "import hvdtrain")
    assert found.text.endswith(f"epochs=1)\n{became or line}\n")
    assert [note.line for note in found.notes] == ([] if became else [3])


def test_a_script_that_trains_and_writes() -> None:
    script = '''"""Text."""
import os
os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
from keras.layers import BatchNormalization

def build():
    return keras.Sequential([BatchNormalization(), keras.layers.BatchNormalization(axis=1)])

if __name__ == "__main__":
    model = build()
    model.fit(
        x, y,  # arrays
        batch_size=16,
        epochs=2,
    )
    with open("a.txt", "w") as f:
        f.write("""one
two""")
    if True:
        plt.savefig(
            "b.png")
    print(open("a.txt").read())
'''
    became = explicit(script)
    assert (
        became.text
        == '''"""Text."""
import os
os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
from keras.layers import BatchNormalization
import hvdtrain
import hvdtrain.keras

hvdtrain.init(seed=0)

def build():
    return keras.Sequential([hvdtrain.keras.SyncBatchNormalization(), hvdtrain.keras.SyncBatchNormalization(axis=1)])

if __name__ == "__main__":
    model = build()
    hvdtrain.Trainer(model, global_batch_size=16).fit(
        x, y,
        epochs=2,
    )
    if hvdtrain.keras.rank() == 0:
        with open("a.txt", "w") as f:
            f.write("""one
two""")
    if True:
        if hvdtrain.keras.rank() == 0:
            plt.savefig(
                "b.png")
    print(open("a.txt").read())
'''
    )
    assert (became.fits, became.notes) == (1, ())


@pytest.mark.parametrize("script", sorted(ADOPTED.glob("*.py")), ids=lambda path: path.stem)
def test_scripts_of_strangers(script: Path) -> None:
    """Each of their fits becomes a Trainer's, or is left with a note, and Python reads the result."""
    text = script.read_text()
    found = explicit(text)
    ast.parse(found.text)
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    fits = [one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr == "fit"]
    of_models = [one for one in fits if "epochs" in {word.arg for word in one.keywords}]
    left = [note for note in found.notes if "this fit is not changed" in note.text]
    assert found.fits + len(left) >= len(of_models)
    assert found.text.count("hvdtrain.Trainer(") == found.fits


@pytest.mark.parametrize("head", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\nname = '\xe4'\n"])
def test_encodings(head: bytes, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(head + b"m.fit(x, y, epochs=2)\r\n")
    done = CliRunner().invoke(main, ["new", "--from", str(script)])
    assert done.exit_code == 0, done.output
    assert "+hvdtrain.Trainer(m, global_batch_size=32).fit(x, y, epochs=2)\n" in done.stdout


@pytest.mark.parametrize("end", ["\n", ""])
def test_the_diff_is_one_for_patch(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = Path("train.py")
    script.write_text(f"import keras\n\nm.fit(x, y, batch_size=4){end}")
    wanted = explicit(script.read_text()).text
    diff = CliRunner().invoke(main, ["new", "--from", "train.py"]).stdout
    # As patch does, but there wherever a clone is.
    subprocess.run(["git", "apply", "-p0"], input=diff, text=True, check=True, capture_output=True)
    assert script.read_text() == wanted


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import keras\nnp.save('x', x)\nm.fit(x, y, epochs=2)\n")
    done = CliRunner().invoke(main, ["new", "--from", str(script)])
    assert done.exit_code == 0, done.output
    assert "+hvdtrain.Trainer(m, global_batch_size=32).fit(x, y, epochs=2)" in done.stdout
    assert f"{script}:2: every worker writes this file" in done.stderr
    assert script.read_text().endswith("m.fit(x, y, epochs=2)\n")
    both = CliRunner().invoke(main, ["new", "mnist", "--from", str(script)])
    assert both.exit_code == 2 and "--from takes no NAME" in both.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"def f(:\n", "is not a Python script: invalid syntax"),
        (b"\xff\xfe\x00", "is not a Python script: "),
        (b"x = '\x00'", "is not a Python script: source code string cannot contain null bytes"),
        (b"import horovod.keras as hvd\n", "train.py: line 1 imports Horovod or hvdtrain"),
        (b"from hvdtrain import Trainer\n", "train.py: line 1 imports Horovod or hvdtrain"),
        (b"print(1)\n", "has no model.fit that could become one of an hvdtrain.Trainer"),
    ],
)
def test_a_script_that_cannot_be_changed(content: bytes, said: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(content)
    done = CliRunner().invoke(main, ["new", "--from", str(script)])
    assert done.exit_code == 2 and said in done.stderr
