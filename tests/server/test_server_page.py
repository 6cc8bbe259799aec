"""The page of the server, in a real browser without a window where one is installed."""

import json
import re
import shutil
import subprocess

import httpx
import pytest

from draftproof import Engine, SamplingParams
from support.browser import BROWSER, PAGE, SET, driven
from support.serving import running, small_engine

NODE = shutil.which("node")
in_browser = pytest.mark.skipif(BROWSER is None, reason="no browser is installed")


def seen(base, folder, *options):
    """The page when the script is done, as HTML."""
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    made = subprocess.run(
        [*command, *options, "--dump-dom", f"{base}/driven"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return made.stdout


def text_of(html, number):
    """The text of an entry."""
    entry = html.split('<div class="entry')[number + 1].split("</b>")[1].split("</div>")[0]
    return re.sub(r"<[^>]+>", "", entry)


@in_browser
def test_a_completion_is_shown_with_the_origin_of_its_tokens(tmp_path):
    script = SET % "{temperature: 0, max_tokens: 60}" + "await send();"
    engine = Engine.load("embedded:stories", "embedded:stories-draft", drafter="model", stopper="fixed:4")
    (expected,) = engine.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=60))
    with running(engine, extend=driven(script)) as (base, _):
        html = seen(base, tmp_path)
    assert text_of(html, 1) == expected.text
    assert html.count('<span class="drafter"') == expected.stats.num_accepted_tokens
    assert f'id="tokens">{expected.stats.num_tokens}<' in html
    assert f'id="calls">{expected.stats.num_target_calls}<' in html
    assert f'id="percall">{expected.stats.block_efficiency:.2f}<' in html
    assert html.count('title="') >= expected.stats.num_target_calls


@in_browser
def test_figures_of_all_requests(tmp_path):
    script = SET % "{temperature: 0, max_tokens: 30}" + "await send(); await send();"
    engine = Engine.load("embedded:stories", "embedded:stories-draft", drafter="model", stopper="fixed:4")
    with running(engine, extend=driven(script)) as (base, _):
        html = seen(base, tmp_path)
    assert 'id="all-requests">2<' in html
    assert 'id="all-tokens">60<' in html
    assert re.search(r'id="all-sources">drafter [0-9]+ %, target [0-9]+ %<', html)
    assert re.search(r'id="all-known">[1-9][0-9]? %<', html)


FIGURES = re.search(r"\nfunction figures\(text\) \{.*?\n\}\n", PAGE, re.DOTALL)[0]


@pytest.fixture(scope="module")
def measured():
    """The metrics of a server that answered two equal requests, and the statistics of one."""
    engine = Engine.load("embedded:stories", "embedded:stories-draft", drafter="model", stopper="fixed:4")
    params = SamplingParams(temperature=0, max_tokens=30)
    prompt = "Once upon a time there was a dog. " * 8
    (expected,) = engine.generate(prompt, params)
    engine = Engine.load("embedded:stories", "embedded:stories-draft", drafter="model", stopper="fixed:4")
    with running(engine) as (base, server):
        for _ in range(2):
            httpx.post(
                f"{base}/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 30}, timeout=60
            )
        return server.metrics.page().decode(), expected.stats


def test_the_metrics_that_the_page_adds_up_are_there(measured):
    names = set(re.findall(r'"(\w+_total)"', FIGURES))
    assert len(names) == 6
    assert names <= set(re.findall(r"^draftproof:(\w+)\{", measured[0], re.MULTILINE))


@pytest.mark.skipif(NODE is None, reason="no node is installed")
def test_figures_are_those_of_the_metrics(measured):
    text, stats = measured
    program = f"{FIGURES} console.log(JSON.stringify(figures({json.dumps(text)})))"
    made = subprocess.run([NODE, "-e", program], capture_output=True, text=True, check=True, timeout=60)
    drafted = round(100 * stats.num_accepted_tokens / 30)
    hits, asked = (float(re.search(rf"prefix_cache_{name}_total{{.*}} (.*)", text)[1]) for name in ("hits", "queries"))
    assert json.loads(made.stdout) == {
        "all-requests": 2,
        "all-tokens": 60,
        "all-percall": f"{stats.block_efficiency:.2f}",
        "all-sources": f"drafter {drafted} %, target {100 - drafted} %",
        "all-known": f"{round(100 * hits / asked)} %",
    }
    assert hits > 0


@in_browser
def test_a_chat_goes_on_and_an_error_is_shown(tmp_path):
    script = (
        SET % "{temperature: 0, max_tokens: 8, seed: 1}"
        + """
    const kind = document.getElementById("kind");
    kind.value = "chat"; kind.dispatchEvent(new Event("change"));
    document.getElementById("system").value = "Be <b>brief</b>.";
    await send();
    document.getElementById("prompt").value = "And then?";
    await send();
    document.querySelector("[name=top_p]").value = 7;
    document.getElementById("prompt").value = "More?";
    await send();
    """
    )
    with running(small_engine(), extend=driven(script)) as (base, _):
        html = seen(base, tmp_path)
    assert "top_p: expected 0 < top_p <= 1, got 7" in text_of(html, 5)
    assert text_of(html, 4) == "More?"
    asked = [{"role": "system", "content": "Be <b>brief</b>."}, {"role": "user", "content": "Once upon a time"}]
    engine, params = small_engine(), SamplingParams(temperature=0, max_tokens=8)
    (first,) = engine.generate(asked, params)
    more = [*asked, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    (second,) = engine.generate(more, params)
    assert text_of(html, 1).strip() == first.text.strip()
    assert text_of(html, 3).strip() == second.text.strip()


@in_browser
def test_the_speed_beside_plain_decoding(tmp_path):
    script = SET % "{temperature: 0, max_tokens: 24}" + "document.getElementById('beside').value = 'yes'; await send();"
    engine = Engine.load("embedded:stories", "embedded:stories-draft", drafter="model", stopper="fixed:4")
    with running(engine, extend=driven(script)) as (base, server):
        html = seen(base, tmp_path)
    assert re.search(r'id="plain">[0-9.]+<', html)
    assert re.search(r'id="gain">[0-9.]+<', html)
    assert server.metrics.generation_tokens._value.get() == 48


REQUIRED = """
    const inner = window.fetch;
    const forced = (text) => JSON.stringify({...JSON.parse(text), tool_choice: "required", parallel_tool_calls: false});
    window.fetch = (url, given) => inner(url, given && given.body ? {...given, body: forced(given.body)} : given);
"""


@in_browser
def test_functions_are_called(tmp_path):
    script = (
        SET % "{temperature: 0, max_tokens: 40, seed: 1}"
        + """
    const kind = document.getElementById("kind");
    kind.value = "chat"; kind.dispatchEvent(new Event("change"));
    document.getElementById("tools").value = '[{"name": "now"}]';
    """
        + REQUIRED
        + "await send();"
    )
    engine = Engine.load("embedded:stories", "embedded:stories-draft")
    engine.tokenizer.chat_template = "{{ tools }}<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}"
    with running(engine, extend=driven(script)) as (base, _):
        html = seen(base, tmp_path)
    assert "calls now" in html
    assert text_of(html, 1) == "{}"


LOOKED_AT = """
    const all = (what) => [...document.querySelectorAll(what)];
    const linear = (each) => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4;
    const light = (text) => text.match(/[0-9.]+/g).slice(0, 3).map((each) => linear(Number(each) / 255))
      .reduce((sum, each, place) => sum + each * [0.2126, 0.7152, 0.0722][place], 0);
    const ratio = (a, b) => {
      const [low, high] = [light(a), light(b)].sort((p, q) => p - q);
      return ((high + 0.05) / (low + 0.05)).toFixed(2);
    };
    const style = getComputedStyle(document.body), soft = getComputedStyle(all(".soft")[0]);
    document.title = [
      document.documentElement.scrollWidth <= innerWidth,
      all("input, textarea, select, button, summary").filter((each) => each.tabIndex < 0).length,
      all("input, textarea, select").filter((each) => !each.labels.length && !each.ariaLabel).length,
      ratio(style.color, style.backgroundColor), ratio(soft.color, style.backgroundColor), light(style.backgroundColor),
    ].join(" ");
"""


@in_browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_by_day_and_by_night(tmp_path, dark):
    """Nothing is wider than the window, every control has a name and the keyboard reaches it, contrast is WCAG's AA."""
    options = ["--window-size=360,700", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    with running(small_engine(), extend=driven(LOOKED_AT)) as (base, _):
        html = seen(base, tmp_path, *options)
    fits, unreachable, unnamed, text, soft, back = re.search("<title>(.*)</title>", html)[1].split()
    assert (fits, unreachable, unnamed) == ("true", "0", "0")
    assert float(text) >= 4.5
    assert float(soft) >= 4.5
    assert (float(back) < 0.2) == dark
