"""Nothing from outside is unpickled or run: no source asks for it, and a pickle in any file's place stays shut."""

import ast
import hashlib
import io
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

import train_grpo
from flow_grpo.models.files.model_files import read_checkpoint
from flow_grpo.rewards.remote import protocol
from flow_grpo.runtime.checkpoints import state_files
from flow_grpo.runtime.tensor_store import TensorStore
from tests.bad_input_cases import Setup, checkpoint_of
from tests.test_architecture import at, dotted_name, imports, last_name, refuse, sources
from tools import convert_recammaster, generate

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
RUNNERS = {"eval", "exec", "compile", "__import__"}
ARCHIVES = {"tarfile", "unpack_archive", "extract", "extractall"}  # names in them may leave the folder
RECIPES = "flow_grpo/settings/own_code.py"  # recipes and code of a user's own are programs, which the user names


def _unsafe(path: str, tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield what could run what a file holds: (place, what it is)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {name.split(".")[0] for name in imports(ast.Module([node], []))}
            yield from ((node, f"imports {name}") for name in names & (MODULES | ARCHIVES))
        if not isinstance(node, ast.Call):
            continue
        called, options = dotted_name(node.func), {word.arg: word.value for word in node.keywords}
        flags = {name: getattr(value, "value", None) for name, value in options.items()}
        if called in RUNNERS or (last_name(node.func) == "exec_module" and path != RECIPES):
            yield node, f"calls {called}"
        if called == "torch.load" and flags.get("weights_only") is not True:
            yield node, "calls torch.load without weights_only=True"
        if flags.get("allow_pickle", False) is not False or flags.get("trust_remote_code", False) is not False:
            yield node, f"calls {called} which may run what it reads"
        if last_name(node.func) in ARCHIVES:
            yield node, f"calls {called}"


def test_no_source_unpickles_unpacks_or_evaluates() -> None:
    refuse([at(s, node, what) for s in sources() for node, what in _unsafe(s.path, s.tree)])


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(file)",
        "torch.load(file, weights_only=flag)",
        "np.load(file, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "eval(text)",
        "shutil.unpack_archive(file)",
        "spec.loader.exec_module(module)",
    ],
)
def test_the_search_finds_what_it_looks_for(code: str) -> None:
    assert list(_unsafe("flow_grpo/x.py", ast.parse(code)))
    assert not list(_unsafe("x.py", ast.parse("torch.load(f, weights_only=True); network.eval(); np.load(f)")))


class Payload:
    def __init__(self, proof: Path) -> None:
        self.proof = str(proof)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (self.proof, "w")


@pytest.fixture
def proof(tmp_path) -> Iterator[Path]:
    """The file that shows that a payload ran; it must not be there at the end."""
    path = tmp_path / "ran"
    pickle.loads(pickle.dumps(Payload(path))).close()
    path.unlink()  # it works, so its absence tells something
    yield path
    assert not path.exists()


def as_pickle(proof: Path) -> bytes:
    return pickle.dumps({"weight": Payload(proof)})


def as_torch_file(proof: Path) -> bytes:
    content = io.BytesIO()
    torch.save({"weight": Payload(proof)}, content)
    return content.getvalue()


def refused(words: list[str], main: Callable[[list[str]], int], capsys) -> str:
    capsys.readouterr()
    assert main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize("made", [as_pickle, as_torch_file])
@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
@pytest.mark.parametrize("ending", [".safetensors", ".bin"])
def test_a_pickle_for_a_part_of_the_model_is_refused(valid, tmp_path, proof, capsys, made, part, ending):
    setup = Setup(valid).copy(tmp_path / "setup")
    (file,) = (setup.folder / "model" / part).glob("*.safetensors")
    file.unlink()
    (
        file.with_name("pytorch_model.bin") if part == "text_encoder" and ending == ".bin" else file.with_suffix(ending)
    ).write_bytes(made(proof))
    assert part in refused(setup.words, train_grpo.main, capsys)


def test_a_pickle_for_a_checkpoint_s_tensors_is_refused(valid, tmp_path, proof, capsys):
    setup = Setup(valid).copy(tmp_path / "setup")
    setup.knobs["resume"] = folder = checkpoint_of(setup)
    file = folder / "state.safetensors"
    file.write_bytes(as_torch_file(proof))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][file.name] = {
        "size": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "state.safetensors is no file of tensors" in refused(setup.words, train_grpo.main, capsys)
    with pytest.raises(ValueError, match="is no file of tensors"):
        state_files.read(folder / "state")


@pytest.mark.parametrize("made", [as_pickle, as_torch_file])
@pytest.mark.parametrize("ending", [".ckpt", ".pt", ".bin", ".safetensors"])
def test_a_pickle_for_original_weights_is_refused(valid, tmp_path, proof, capsys, made, ending):
    file = tmp_path / f"recammaster{ending}"
    file.write_bytes(made(proof))
    with pytest.raises(ValueError, match="recammaster"):
        read_checkpoint(file)
    words = ["--recammaster", str(file), "--wan", str(valid / "model"), "--out", str(tmp_path / "out")]
    assert file.name in refused(words, convert_recammaster.main, capsys)


def test_a_pickle_for_an_adapter_is_refused(valid, tmp_path, proof, capsys):
    (tmp_path / "adapter").mkdir()
    file = tmp_path / "adapter" / "pytorch_lora_weights.safetensors"
    file.write_bytes(as_torch_file(proof))
    words = ["--model", str(valid / "model"), "--source", str(next(valid.rglob("*.mp4"))), "--camera", "pan_left"]
    words += ["--out", str(tmp_path / "out"), "--adapter", str(file.parent), "--device", "cpu", "--frames", "5"]
    assert file.name in refused([*words, "--height", "24", "--width", "32"], generate.main, capsys)


def test_a_pickle_among_encodings_is_made_again(tmp_path, proof, caplog):
    store = TensorStore(tmp_path / "kept")
    path = store.path("prompts", "a")
    path.parent.mkdir(parents=True)
    path.write_bytes(as_torch_file(proof))
    assert torch.equal(store.get("prompts", "a", lambda: torch.ones(2)), torch.ones(2))
    assert "is made again" in caplog.text


@pytest.mark.parametrize("made", [as_pickle, as_torch_file])
def test_a_pickle_is_no_request_to_a_reward_server(proof, made):
    with pytest.raises(SafetensorError):
        protocol.read_request(made(proof))
