"""Models without a typed renderer: a clear warning, full renders, and a path only where the render extends it exactly."""

import json
import logging
from types import SimpleNamespace

import pytest
from scripted import ProxyProcess, Turn, harness, path_ids
from transformers import PreTrainedTokenizerFast

from gyre_lib.benchmarks.proxy_rig.small_tokenizer import write_small_model
from gyre_lib.trajectories.history import EchoedCall, Part, reply, supplied
from gyre_lib.trajectories.trajectory_tree import empty_path
from proxy_app.rendering import Rendering, RenderingRefused
from proxy_app.turns import _exact_extension

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    folder = write_small_model(tmp_path_factory.mktemp("other"), vocab_size=1500, model_type="other")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 4000}))
    return folder


def test_a_full_render_extends_a_path_only_if_it_begins_with_it(other_model, caplog):
    with caplog.at_level(logging.WARNING):
        rendering = Rendering(other_model)
    assert not rendering.bridges and "cannot be bridged" in caplog.text
    question = supplied([Part("user", "question")])
    first = rendering.full("", (), [question])
    sampled = [*rendering.tokenizer.encode("one"), rendering.stop_token_ids[0]]
    parent = SimpleNamespace(total_tokens=len(first) + len(sampled), token_path=lambda: empty_path().extended(first + sampled))
    follows = [question, reply("one", "", []), supplied([Part("user", "more")])]
    whole = rendering.full("", (), follows)
    found, new = _exact_extension(parent, whole)
    assert found is parent and first + sampled + new == whole
    assert _exact_extension(parent, rendering.full("", (), [supplied([Part("user", "other")]), *follows[1:]]))[0] is None
    with pytest.raises(RenderingRefused):
        rendering.full("", (), [supplied([Part("tool", "x", "c")]), reply("y", "", [EchoedCall("c", "f", "not an object")])])
    assert rendering.parse(first, sampled, ()).text == "one"


@pytest.mark.slow
def test_a_conversation_with_a_template_that_cannot_be_bridged(other_model, tmp_path):
    rendering = Rendering(other_model)
    proxy = ProxyProcess(tmp_path / "run", other_model, "auto")
    replies = iter([Turn(raw="one"), Turn(raw="two"), Turn(raw="three")])
    try:
        with harness(proxy, other_model, rendering, lambda request: next(replies)) as h:
            messages = []
            for n in range(3):
                messages.append({"role": "user", "content": f"question {n}"})
                messages.append({"role": "assistant", "content": h.messages(messages)["content"]})
                if n == 1:
                    messages[0]["content"] = "rewritten"
            records = h.records()
            assert [r.branch_reason for r in records] == ["root", "extension", "root"]
            assert [path_ids(records, r) for r in records] == [sent.ids for sent in h.engine.requests]
    finally:
        proxy.stop()
