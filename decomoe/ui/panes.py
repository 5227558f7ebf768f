"""Two answers side by side: streamed as they come, then replayed together at the speed at which they came.

Text of people and models is only ever set as `textContent`: see `chart` on Gradio's templates.
"""

from typing import Any

import gradio as gr

from ..difference import differences
from ..trace import Trace

TEMPLATE = """<div class="panes">
  <section class="pane" id="dense-answer" aria-label="Answer of the baseline">
    <h2></h2><p class="pane-text"></p><p class="pane-note"></p></section>
  <section class="pane pane-ours" id="decomoe-answer" aria-label="Answer of DecoMoE">
    <h2></h2><p class="pane-text"></p><p class="pane-note"></p></section>
</div>
<p class="pane-truth"></p>
<div class="pane-tools"><button type="button" class="pane-replay" hidden>Replay at true speed</button>
  <span class="pane-label"></span></div>
<div class="unseen" role="status" aria-live="polite"></div>"""
DRAW = """
const sides = [...element.querySelectorAll('.pane')], find = (name) => element.querySelector('.pane-' + name);
const button = find('replay'), status = element.querySelector('[role=status]');
let frame = 0, last = null, stopped = null;
const say = (node, text) => { if (node.textContent !== (text || '')) node.textContent = text || ''; };
const part = (side, name) => side.querySelector(name);
const marked = (node, pieces) => {
  node.replaceChildren();
  for (const [text, same] of pieces) {
    const made = document.createElement(same ? 'span' : 'mark');
    made.textContent = text;
    node.append(made, ' ');
  }
};
const show = () => {
  const value = props.value || {};
  element.dataset.state = value.state || 'empty';
  element.dataset.label = value.label || '';
  sides.forEach((side, i) => {
    const pane = value.panes?.[i] || {}, text = part(side, '.pane-text');
    say(part(side, 'h2'), pane.title);
    if (pane.pieces) marked(text, pane.pieces); else say(text, pane.text);
    say(part(side, '.pane-note'), pane.note);
    side.classList.toggle('pane-busy', value.state === 'running' && value.at === i);
  });
  say(find('truth'), value.truth ? 'True answer: ' + value.truth : '');
  say(find('label'), value.label);
  say(status, value.status);
  button.hidden = value.state !== 'done';
};
const replay = () => {
  cancelAnimationFrame(frame);
  const panes = props.value.panes, began = performance.now();
  element.dataset.state = 'replaying';
  const step = () => {
    const now = (performance.now() - began) / 1000;
    let busy = false;
    sides.forEach((side, i) => {
      const {times, ends, text, note} = panes[i], count = times.filter((time) => time <= now).length;
      const running = count < times.length;
      busy ||= running;
      say(part(side, '.pane-text'), [...text].slice(0, count ? ends[count - 1] : 0).join(''));
      say(part(side, '.pane-note'), running ? (now * 1000).toFixed(0) + ' ms' : note);
      side.classList.toggle('pane-busy', running);
    });
    if (busy) frame = requestAnimationFrame(step); else show();
  };
  step();
};
const update = () => {
  const {state: before, label: old} = element.dataset, value = props.value || {};
  if (value.state === 'stopped') stopped = value.run;
  if (value.state === 'running' && value.run === stopped) return;  // was under way when Stop was pressed
  cancelAnimationFrame(frame);
  const begins = (value.state === 'running' && before !== 'running') || (value.label && value.label !== old);
  show();
  if (begins) element.scrollIntoView({block: 'nearest'});
  const {state, run} = props.value || {};
  if (state === 'done' && run && run !== last && !matchMedia('(prefers-reduced-motion: reduce)').matches) replay();
  if (state === 'done') last = run;
};
button.addEventListener('click', replay);
watch('value', update);
update();
"""
CSS = """
.panes {display: grid; grid-template-columns: 1fr 1fr; gap: 0.75rem}
.pane {border: 1px solid var(--border-color-primary); border-top: 3px solid var(--dense); border-radius: 8px;
  background: var(--block-background-fill); padding: 0.75rem 1rem; min-height: 7rem; display: flex;
  flex-direction: column; min-width: 0}
.pane-ours {border-top-color: var(--ours)}
.pane h2 {margin: 0 0 0.375rem; font-size: 0.875rem; font-weight: 600}
.pane .pane-text {flex: 1; margin: 0; font-size: 1.0625rem; line-height: 1.5; overflow-wrap: anywhere;
  white-space: pre-wrap}
.pane-note, .pane-label {font-size: 0.8125rem; color: var(--body-text-color-subdued); margin: 0.375rem 0 0;
  font-variant-numeric: tabular-nums}
.pane mark {background: color-mix(in srgb, var(--dense) 40%, transparent); color: inherit; border-radius: 3px}
.pane-ours mark {background: color-mix(in srgb, var(--ours) 30%, transparent)}
.pane-busy .pane-text::after {content: '▍'; color: var(--ours)}
.pane-truth {margin: 0.5rem 0 0} .pane-truth:empty {display: none}
.pane-tools {display: flex; flex-wrap: wrap; align-items: center; gap: 0.75rem; margin-top: 0.5rem; min-height: 1.75rem}
.pane-tools .pane-label {margin: 0}
.unseen {position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%)}
@media (max-width: 520px) {.panes {grid-template-columns: 1fr} .pane {min-height: 5rem}}
"""
Shown = dict[str, Any]


def panes() -> gr.HTML:
    """The component; what it shows is what `waiting`, `running` and `done` make."""
    return gr.HTML(waiting(), html_template=TEMPLATE, js_on_load=DRAW, elem_id="answers")


def waiting() -> Shown:
    """Before the first question."""
    return {"state": "empty", "panes": [{"title": "Dense"}, {"title": "DecoMoE"}]}


def running(titles: tuple[str, str], dense: Trace | None, text: str, status: str, run: str, note: str = "") -> Shown:
    """While an answer is being made: the first until there is a trace of it, then the second."""
    sides = [{"title": title, "text": "", "note": ""} for title in titles]
    at = 0 if dense is None else 1
    if dense is not None:
        sides[0] |= {"text": dense.answer, "note": _note(dense)}
    sides[at] |= {"text": text, "note": note}
    return {"state": "running", "at": at, "panes": sides, "status": status, "run": run}


def done(traces: tuple[Trace, Trace], titles: tuple[str, str], truth: str | None, label: str, run: str | None) -> Shown:
    """Both answers with their differences. A new `run` is replayed at once; None only on a click."""
    pieces = differences(traces[0].answer, traces[1].answer)
    sides = [
        {
            "title": title,
            "text": trace.answer,
            "note": _note(trace),
            "times": [round(time, 4) for time in trace.token_times_s],
            "ends": trace.token_ends,
            "pieces": [[piece[side], piece[2]] for piece in pieces if piece[side]],
        }
        for side, (trace, title) in enumerate(zip(traces, titles, strict=True))
    ]
    same = "the same answer" if traces[0].answer == traces[1].answer else "different answers"
    status = f"Finished, {same}. {exit_sentence(traces[1])}"
    return {"state": "done", "panes": sides, "truth": truth, "label": label, "run": run, "status": status}


def exit_sentence(trace: Trace) -> str:
    """Where the picture left."""
    if trace.exit_after is None:
        return "The visual tokens stay in all layers."
    by = "the gate's choice" if trace.theta is not None else "fixed"
    return f"The visual tokens leave after layer {trace.exit_after} of {trace.layers} ({by})."


def _note(trace: Trace) -> str:
    """First token, further tokens, all of it."""
    times = trace.token_times_s
    tpot = "" if trace.tpot_s is None else f" · {trace.tpot_s * 1000:.0f} ms a further token"
    count = f"{len(times)} token{'s' if len(times) > 1 else ''}"
    return f"first token {times[0] * 1000:.0f} ms{tpot} · {count}" if times else ""
