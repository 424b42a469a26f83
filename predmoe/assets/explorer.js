// The explorer: controls, numbers, timeline and map. One module for both hosts: a notebook (anywidget, whose kernel simulates each
// position) and a page of the report (a stub model below, over a table of positions simulated before). It draws what it is given, and computes no result.
//
// The model has `controls` [{name, kind: "menu" | "range", values, of}], `settings` {name: value}, `view` (see explore.view) and `imports`
// (may a file be chosen?); it is told of a change by set("settings", ...) and save_changes(), and answers by changing `view`.

const TEXT = {
  trace: ["Trace", (v) => v], arm: ["Model", (v) => v],
  predictor: ["Predictor", (v) => PREDICTORS[v] ?? v],
  policy: ["Cache policy", (v) => POLICIES[v] ?? v],
  guard: ["Prefetch guard", (v) => ({ none: "none (every guess is queued)", window: "only what fits in time" })[v] ?? v],
  horizon: ["Horizon", (v) => `${v} layer${v === 1 ? "" : "s"} ahead`],
  budget: ["Over-fetch", (v) => (v === 0 ? "the best k guesses" : `${v} more than k`)],
  slots: ["Cache size", (v, c) => `${v} of ${c.of} (${percent(v / c.of, 0)})`],
  gb_per_s: ["Disk bandwidth", (v) => `${v} GB/s`],
  latency_ms: ["Disk latency", (v) => `${v} ms`],
  layer_ms: ["Compute per layer", (v) => `${v} ms`],
};
const PREDICTORS = { linear: "linear", ranking: "ranking MLP", next_router: "next layer's router", cotrained: "co-trained head", token_id: "token-id lookup",
  static: "most popular experts", none: "none in this trace" };
const POLICIES = { lru: "LRU", fifo: "FIFO", lfu: "LFU", lfru: "LFRU", "least-stale": "Least-Stale", belady: "Belady (knows the future)", static: "static (most used, fixed)" };
const ROWS = { demand: "no prefetch", router: "next layer's router", predictor: "predictor", oracle: "oracle" };
const KINDS = ["computation", "stall", "demand read", "prefetch read"];
const COLUMNS = [["tok_s", "Speed", "tok/s", (v) => digits(v)], ["gain", "Gain", "%", (v) => signed(100 * v)], ["hit_rate", "Hits", "%", (v) => (100 * v).toFixed(1)],
  ["stall_ms", "Stall", "ms/token", (v) => digits(v)], ["read_mb", "Read", "MB/token", (v) => digits(v)], ["wasted_mb", "Wasted", "MB/token", (v) => digits(v)]];
const MARK = 7; // half a marker of the map, in its units
const SILENCE_MS = 20000; // without an answer for so long, no kernel is there

const digits = (v) => (v === 0 ? "0" : Math.abs(v) >= 1000 ? v.toFixed(0) : Math.abs(v) < 0.001 ? v.toExponential(1) : v.toPrecision(4));
const short = (v) => Number(v.toPrecision(4)).toString();
const signed = (v) => `${v < -0.0499 ? "−" : "+"}${Math.abs(v).toFixed(1)}`;
const percent = (v, places = 1) => `${(100 * v).toFixed(places)}%`;
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const sentence = (text) => (text ? (/^[a-z]+[ ,]/.test(text) ? text[0].toUpperCase() + text.slice(1) : text) + (/[.!?]$/.test(text) ? "" : ".") : ""); // names of files and settings stay as they are
let instances = 0;

function render({ model, el }) {
  const id = `explorer-${++instances}`;
  const root = document.createElement("section");
  root.className = "explorer";
  root.setAttribute("aria-label", "Explorer of cache, disk and prefetch");
  root.innerHTML = `<form class="ex-controls" aria-label="Settings"></form>
    <p class="ex-answer" role="status" aria-live="polite"></p>
    <p class="ex-about"></p><div class="ex-results">
    <div class="ex-table" tabindex="0" role="region" aria-label="Numbers"></div>
    <figure class="ex-map"></figure><figure class="ex-timeline"></figure></div>`;
  el.replaceChildren(root);
  const part = (name) => root.querySelector(`.ex-${name}`);
  let silence = null, gone = false; // gone: the notebook said that its kernel is

  const settle = () => { clearTimeout(silence); root.removeAttribute("aria-busy"); };
  const wait = () => { // what is shown belongs to other settings, or to another trace: it is dimmed until an answer comes
    root.setAttribute("aria-busy", "true");
    clearTimeout(silence);
    silence = setTimeout(lost, gone ? 1000 : SILENCE_MS);
  };
  const lost = () => problem("Nothing answers: this view needs a running kernel. Run the notebook's cells again.", true);
  const leave = () => { gone = true; lost(); };
  const problem = (text, stale = false) => { // stale: the numbers are not those of the controls
    settle();
    part("answer").textContent = text;
    part("answer").classList.add("ex-problem");
    if (stale) { part("results").hidden = true; part("about").textContent = ""; }
  };
  const current = () => { const { settings, problem } = model.get("view") ?? {}, asked = model.get("settings"); return problem || (settings && Object.keys(settings).every((name) => settings[name] === asked[name])); };
  const ask = (changes) => {
    model.set("settings", { ...model.get("settings"), ...changes });
    wait();
    model.save_changes(); // a page answers at once, a kernel later
    if (current() && !model.get("view").problem) drawView(); // moved to and fro: a kernel has nothing new to say
  };
  const drawControls = () => {
    const focused = root.contains(document.activeElement) ? document.activeElement.id : null;
    const free = model.get("controls").filter((control) => control.values.length > 1);
    part("controls").replaceChildren(...free.map((control) => field(control, model.get("settings"), id, ask)),
      ...(model.get("imports") ? [chooser(model, id, problem, wait)] : []), ...held(model));
    if (focused) document.getElementById(focused)?.focus();
  };
  const drawView = () => {
    const view = model.get("view");
    if (!view || !view.settings) return;
    gone = false;
    if (current()) settle();
    else wait(); // a slider has been moved on meanwhile
    show(root, view, id);
    root.dataset.settings = JSON.stringify(view.settings);
  };
  const follow = () => { // settings that the other side has moved
    for (const [name, value] of Object.entries(model.get("settings"))) {
      const input = root.querySelector(`[name="${name}"]`), control = model.get("controls").find((c) => c.name === name);
      if (input && control) place(input, control, value);
    }
  };
  const watch = new ResizeObserver(() => { const view = model.get("view"); if (view && !view.problem && root.clientWidth) part("timeline").innerHTML = timeline(view, `${id}-hatch`, part("timeline").clientWidth); });
  watch.observe(root);
  part("controls").addEventListener("submit", (event) => event.preventDefault());
  model.on("change:controls", drawControls);
  model.on("change:settings", follow);
  model.on("change:view", drawView);
  model.on("comm_live_update", leave); // a notebook's word that its kernel is gone
  drawControls();
  drawView();
  return () => { clearTimeout(silence); watch.disconnect(); model.off("change:controls", drawControls); model.off("change:settings", follow); model.off("change:view", drawView); model.off("comm_live_update", leave); };
}

// --- controls ---------------------------------------------------------------------------------------------------------------

function field(control, settings, id, ask) {
  const [label, say] = TEXT[control.name], box = document.createElement("div"), name = `${id}-${control.name}`;
  box.className = `ex-control ex-${control.kind}`;
  if (control.kind === "menu") {
    const options = control.values.map((v, i) => `<option value="${i}">${escaped(say(v, control))}</option>`).join("");
    box.innerHTML = `<label for="${name}">${label}</label><select id="${name}" name="${control.name}">${options}</select>`;
  } else {
    box.innerHTML = `<label for="${name}">${label}</label><output for="${name}"></output>
      <input type="range" id="${name}" name="${control.name}" min="0" max="${control.values.length - 1}" step="1">`;
  }
  const input = box.querySelector("input,select");
  input.setAttribute("data-lm-suppress-shortcuts", "true"); // arrow keys are the slider's, not JupyterLab's, which looks at the focused element first
  place(input, control, settings[control.name]);
  input.addEventListener(control.kind === "menu" ? "change" : "input", () => {
    const value = control.values[Number(input.value)];
    place(input, control, value);
    ask({ [control.name]: value });
  });
  return box;
}

function held(model) { // what cannot be moved, and why
  const fixed = model.get("fixed"), still = [...model.get("controls").filter((control) => control.values.length < 2), ...(fixed ?? [])];
  if (!still.length) return [];
  const box = document.createElement("p"), said = still.map((control) => `${TEXT[control.name][0].toLowerCase()} ${TEXT[control.name][1](control.values[0], control)}`);
  box.className = "ex-held";
  box.textContent = `${fixed ? "Held on this page, whose positions were all simulated beforehand (with a kernel these move too)" : "Nothing to choose in this trace"}: ${said.join("; ")}.`;
  return [box];
}

function place(input, control, value) {
  const at = control.values.indexOf(value);
  if (at < 0) return;
  input.value = String(at);
  if (control.kind === "menu") return;
  const said = TEXT[control.name][1](value, control);
  input.setAttribute("aria-valuetext", said);
  input.parentElement.querySelector("output").textContent = said;
}

function chooser(model, id, problem, wait) {
  const box = document.createElement("div"), limit = model.get("imports");
  box.className = "ex-control ex-file";
  box.innerHTML = `<label for="${id}-file">A trace of your own</label><input type="file" id="${id}-file" name="file">`;
  const input = box.querySelector("input");
  input.addEventListener("click", () => { input.value = ""; }); // the same file may be chosen again, mended
  input.addEventListener("change", async () => {
    const [file] = input.files;
    if (!file) return;
    if (file.size > limit) return problem(`${file.name} has ${(file.size / 1e6).toFixed(1)} MB, more than the ${(limit / 1e6).toFixed(0)} MB that are sent to a kernel: load it in the notebook and give it to explorer().`);
    let content;
    try { content = await file.arrayBuffer(); } catch { return problem(`${file.name} cannot be read: it is a folder, it is gone, or you may not read it. Choose another file.`); }
    wait();
    model.send({ kind: "import", name: file.name }, undefined, [content]);
  });
  return box;
}

// --- results ----------------------------------------------------------------------------------------------------------------

function show(root, view, id) {
  const part = (name) => root.querySelector(`.ex-${name}`), answer = part("answer");
  answer.classList.toggle("ex-problem", Boolean(view.problem));
  answer.textContent = view.problem ? sentence(view.problem) : told(view);
  part("results").hidden = Boolean(view.problem);
  part("about").textContent = view.problem ? "" : view.about;
  if (view.problem) return;
  part("table").innerHTML = table(view);
  part("map").innerHTML = map(view, `${id}-map`);
  part("timeline").innerHTML = timeline(view, `${id}-hatch`, part("timeline").clientWidth);
}

function told(view) {
  const [demand, , predictor, oracle] = view.rows, name = PREDICTORS[view.settings.predictor] ?? view.settings.predictor;
  if (demand.problem) return sentence(demand.problem);
  if (demand.tok_s === null) return "Without prefetch nothing takes any time here, so there is no speed to compare.";
  const start = `Without prefetch ${digits(demand.tok_s)} tok/s`;
  const why = (row) => row.problem?.replace(/\.$/, "");
  if (why(predictor) && why(predictor) === why(oracle)) return `${start}; with prefetch no answer: ${why(oracle)}.`;
  const ahead = (row, who) => (row.problem ? `with the ${who} no answer: ${why(row)}` : row.note ? `with the ${who}: ${row.note}`
    : `with the ${who} ${digits(row.tok_s)} (${signed(100 * (row.tok_s / demand.tok_s - 1))}%)`);
  return `${start}; ${view.settings.predictor === "none" ? "this trace holds no guesses" : ahead(predictor, name.startsWith("next") ? name : `${name} predictor`)}; ${ahead(oracle, "oracle")}.`;
}

function table(view) {
  const base = view.rows[0].tok_s, best = Math.max(...view.rows.map((row) => row.tok_s ?? 0), 1e-12);
  const head = COLUMNS.map(([, name, unit]) => `<th scope="col">${name}<br><span>${unit}</span></th>`).join("");
  const body = view.rows.map((row) => {
    const who = row.row === "predictor" ? PREDICTORS[row.source] ?? row.source : ROWS[row.row];
    const title = `<th scope="row">${escaped(who)}</th>`;
    if (row.problem) return `<tr data-row="${row.row}">${title}<td class="ex-none" colspan="${COLUMNS.length}">${escaped(sentence(row.problem))}</td></tr>`;
    const values = { ...row, gain: row.row === "demand" || !base || row.tok_s === null ? null : row.tok_s / base - 1 };
    const cells = COLUMNS.map(([key, , , say]) => {
      const value = values[key], none = value === null || value === undefined;
      const bar = key === "tok_s" && !none ? `<span class="ex-bar" style="width:${(100 * value / best).toFixed(1)}%"></span>` : "";
      return `<td${none ? "" : ` data-${key.replace("_", "-")}="${value}"`}>${none ? "–" : say(value)}${bar}</td>`;
    });
    return `<tr data-row="${row.row}">${title}${cells.join("")}</tr>${row.note ? `<tr><td></td><td class="ex-none" colspan="${COLUMNS.length}">${escaped(sentence(row.note))}</td></tr>` : ""}`;
  });
  return `<table><caption>Per decoded token, simulated on the whole trace<span class="ex-more"> (more columns to the right: scroll)</span></caption><thead><tr><th scope="col">Prefetch</th>${head}</tr></thead><tbody>${body.join("")}</tbody></table>`;
}

function timeline(view, hatch, width) {
  const parts = view.timeline.filter((p) => p.ms > 0);
  if (!parts.length) return `<figcaption>In the last tokens of the trace nothing takes any time.</figcaption>`;
  const W = Math.max(width || 900, 280), left = 82, wide = W - left - 8, longest = Math.max(...parts.map((p) => p.ms)), height = 92, H = parts.length * height + 34;
  const out = [], unit = 2000;
  parts.forEach((p, i) => {
    const top = i * height, scale = (wide * p.ms) / longest / unit, paths = ["", "", "", ""];
    const who = p.row === "demand" ? "no prefetch" : PREDICTORS[view.settings.predictor] ?? view.settings.predictor;
    for (const [kind, start, length] of p.rows) {
      const y = top + (kind < 2 ? 54 : 26);
      paths[kind] += `M${(left + start * scale).toFixed(1)} ${y}h${Math.max(length * scale, 0.4).toFixed(1)}v24h-${Math.max(length * scale, 0.4).toFixed(1)}z`;
    }
    out.push(`<text x="0" y="${top + 16}" class="ex-title">${escaped(who)}: ${digits(p.ms)} ms</text><text x="0" y="${top + 43}">disk</text><text x="0" y="${top + 71}">processor</text>`);
    paths.forEach((d, kind) => { if (d) out.push(`<path d="${d}" class="ex-kind${kind}"/>${kind === 3 ? `<path d="${d}" fill="url(#${hatch})"/>` : ""}`); });
    for (const end of p.ends) out.push(`<path d="M${(left + end * scale).toFixed(1)} ${top + 22}v60" class="ex-end"/>`);
  });
  const step = nice((longest * 80) / wide), y = H - 28;
  for (let t = 0; t <= longest + 1e-9; t += step) out.push(`<path d="M${(left + (wide * t) / longest).toFixed(1)} ${y}v5" class="ex-end"/><text x="${(left + (wide * t) / longest).toFixed(1)}" y="${y + 19}" text-anchor="middle">${short(t)}</text>`);
  out.push(`<text x="0" y="${y + 19}">time (ms)</text>`);
  const passes = parts[0].ends.length, said = parts.map((p) => `${p.row === "demand" ? "without prefetch" : "with the predictor"} ${digits(p.ms)} ms, of which ${digits((p.ms * p.rows.filter((r) => r[0] === 1).reduce((sum, r) => sum + r[2], 0)) / unit)} stalled`).join("; ");
  const key = KINDS.map((name, kind) => `<span class="ex-key"><span class="ex-swatch ex-back${kind}"></span>${name}</span>`).join(" ");
  return `<figcaption>Disk and processor in the last ${passes === 1 ? "token" : `${passes} tokens`} of the trace. A line across both: a token is done.<br>${key}</figcaption>
    <svg viewBox="0 0 ${W} ${H}" role="img" aria-label="Timeline: ${escaped(said)}"><defs><pattern id="${hatch}" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path d="M0 0v7" class="ex-hatch"/></pattern></defs>${out.join("")}</svg>`;
}

const nice = (x) => { const p = 10 ** Math.floor(Math.log10(x)); return [1, 2, 5, 10].map((m) => m * p).find((v) => v >= x); };

function map(view) {
  const m = view.map, caption = `<figcaption>The harm map: gain in tok/s (%) of a predictor of each recall and precision on this machine, ${m?.prompt ? `first ${m.tokens} tokens after the prompt` : `first ${m?.tokens} tokens`}.
    Thick line: where help turns to harm.</figcaption>`;
  if (!m || m.problem) return `${caption}<p class="ex-none">${escaped(sentence(m?.problem ?? "there is no map"))}</p>`;
  const size = 62, tall = 42, left = 58, top = 6, columns = m.precisions.length, rows = m.recalls.length, out = [];
  const gain = (i, j) => m.gain[i]?.[j] ?? null, y = (i) => top + (rows - 1 - i) * tall, x = (j) => left + j * size;
  const most = Math.max(0.01, ...m.gain.flat().map((v) => Math.abs(v ?? 0)));
  const at = (list, v, start, step) => start + step * (interpolate(list, v) + 0.5), bottom = top + rows * tall, numbers = [];
  const marks = (m.points ?? []).map((p) => ({ ...p, cx: at(m.precisions, p.precision, left, size), cy: bottom - at(m.recalls, p.recall, 0, tall) }));
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) {
    const v = gain(i, j);
    out.push(v === null ? `<rect x="${x(j)}" y="${y(i)}" width="${size}" height="${tall}" class="ex-cannot"/>`
      : `<rect x="${x(j)}" y="${y(i)}" width="${size}" height="${tall}" class="${v < 0 ? "ex-harm" : "ex-help"}" fill-opacity="${(0.1 + 0.55 * Math.abs(v) / most).toFixed(2)}"/>`);
    if (v === null) continue;
    const said = signed(100 * v), [tx, ty] = clear(x(j) + size / 2, y(i) + tall / 2, size, tall, 8.2 * said.length, marks);
    numbers.push(`<text x="${tx.toFixed(1)}" y="${(ty + 5).toFixed(1)}" text-anchor="middle" data-gain="${v}">${said}</text>`);
  }
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) {
    const v = gain(i, j), right = gain(i, j + 1), above = gain(i + 1, j);
    if (v !== null && right !== null && v < 0 !== right < 0) out.push(`<path d="M${x(j + 1)} ${y(i)}v${tall}" class="ex-edge"/>`);
    if (v !== null && above !== null && v < 0 !== above < 0) out.push(`<path d="M${x(j)} ${y(i)}h${size}" class="ex-edge"/>`);
  }
  const names = { predictor: PREDICTORS[view.settings.predictor] ?? view.settings.predictor, router: "next layer's router" };
  for (const { row, cx, cy } of marks)
    out.push(row === "predictor" ? `<circle cx="${cx.toFixed(1)}" cy="${cy.toFixed(1)}" r="${MARK}" class="ex-point"/>` : `<path d="M${cx.toFixed(1)} ${(cy - MARK).toFixed(1)}l${MARK} ${MARK}l-${MARK} ${MARK}l-${MARK}-${MARK}z" class="ex-point ex-other"/>`);
  out.push(...numbers);
  m.precisions.forEach((v, j) => out.push(`<text x="${x(j) + size / 2}" y="${bottom + 17}" text-anchor="middle">${v}</text>`));
  m.recalls.forEach((v, i) => out.push(`<text x="${left - 6}" y="${y(i) + tall / 2 + 5}" text-anchor="end">${v}</text>`));
  out.push(`<text x="${left + (columns * size) / 2}" y="${bottom + 36}" text-anchor="middle">precision of the guesses</text><text transform="translate(14 ${top + (rows * tall) / 2}) rotate(-90)" text-anchor="middle">recall</text>`);
  const where = (m.points ?? []).map((p) => `${p.row === "predictor" ? "●" : "◇"} ${names[p.row]}: recall ${p.recall.toFixed(2)}, precision ${p.precision.toFixed(2)}`);
  const harmed = m.gain.flat().filter((v) => v !== null && v < 0).length, all = m.gain.flat().filter((v) => v !== null).length;
  return `${caption}<svg viewBox="0 0 ${left + columns * size + 4} ${bottom + 44}" role="img" aria-label="Harm map: prefetching harms in ${harmed} of ${all} cells. ${escaped(where.join("; "))}">${out.join("")}</svg>
    <p class="ex-where">${where.map(escaped).join("<br>") || "This trace holds no guesses at this horizon, so no point is on the map."}</p>`;
}

// Where a number of `width` stands in a cell (its middle x, y) clear of the markers: in the middle if it can, else below, above or aside, else where most room is left.
function clear(x, y, size, tall, width, marks) {
  const up = tall / 2 - 9, aside = Math.max(0, (size - width) / 2 - 2);
  const spots = [[0, 0], [0, up], [0, -up], [aside, up], [-aside, up], [aside, -up], [-aside, -up], [aside, 0], [-aside, 0]];
  const room = ([dx, dy]) => Math.min(99, ...marks.map((p) => Math.hypot(Math.max(0, Math.abs(p.cx - x - dx) - width / 2), Math.max(0, Math.abs(p.cy - y - dy) - 7)) - MARK - 1));
  const best = spots.find((spot) => room(spot) >= 0) ?? spots.reduce((a, b) => (room(b) > room(a) ? b : a));
  return [x + best[0], y + best[1]];
}

function interpolate(list, v) { // position of v among rising values, held at the ends
  const after = list.findIndex((at) => at >= v);
  if (after <= 0) return after < 0 ? list.length - 1 + 0.4 : Math.max(-0.4, (v - list[0]) / (list[1] - list[0]));
  return after - 1 + (v - list[after - 1]) / (list[after] - list[after - 1]);
}

// --- the host of a page -------------------------------------------------------------------------------------------------------

// A model over a table of positions (see explore_grid): the same interface as a notebook's, answered from the page itself.
class Tabulated {
  constructor(data, numbers) {
    Object.assign(this, { data, numbers, heard: {}, state: { controls: data.controls, settings: { ...data.fixed, ...data.settings }, imports: 0,
      fixed: Object.entries(data.fixed).map(([name, value]) => ({ name, values: [value] })) } });
    this.state.view = this.view();
  }
  get(name) { return this.state[name]; }
  set(name, value) { this.state[name] = value; }
  on(event, call) { (this.heard[event] ??= []).push(call); }
  off(event, call) { this.heard[event] = (this.heard[event] ?? []).filter((other) => other !== call); }
  save_changes() {
    this.state.view = this.view();
    for (const call of this.heard["change:view"] ?? []) call();
  }
  index(table) {
    return table.axes.reduce((at, name) => {
      const { values } = this.data.controls.find((control) => control.name === name);
      return at * values.length + values.indexOf(this.state.settings[name]);
    }, 0);
  }
  view() {
    const { data, numbers } = this, settings = this.state.settings, rows = [], lines = [];
    for (const [row, table] of Object.entries(data.rows)) {
      const at = this.index(table), source = row === "predictor" ? settings.predictor : table.source;
      const values = numbers.floats.subarray(table.from + at * data.columns.length, table.from + (at + 1) * data.columns.length);
      const note = data.words[numbers.words[table.words + at]];
      if (note?.problem) { rows.push({ row, source, problem: note.problem }); continue; }
      rows.push({ row, source, ...Object.fromEntries(data.columns.map((name, i) => [name, Number.isNaN(values[i]) ? null : values[i]])), ...(note?.note ? { note: note.note } : {}) });
    }
    for (const row of ["demand", "predictor"]) {
      const table = data.rows[row], at = this.index(table), [from, to] = numbers.offsets.subarray(table.lines + at, table.lines + at + 2);
      if (to === from) continue;
      const found = [];
      for (let i = from, start = 0; i < to; i++) { start += numbers.starts[i]; found.push([numbers.kinds[i], start, numbers.lengths[i]]); }
      lines.push({ row, ms: numbers.spans[table.lines + at], rows: found.filter((r) => r[0] < 4), ends: found.filter((r) => r[0] === 4).map((r) => r[1]) });
    }
    const { map } = data, cells = map.recalls.length * map.precisions.length, base = this.index(map) * cells;
    const gain = map.recalls.map((_, i) => map.precisions.map((_, j) => { const v = numbers.gains[base + i * map.precisions.length + j]; return v === -32768 ? null : v / 1000; }));
    const points = data.points[`${settings.trace}|${settings.arm}|${settings.predictor}|${settings.horizon}|${settings.budget}`] ?? [];
    const held = `${settings.trace}|${settings.arm}`;
    return { settings: { ...settings }, about: data.about[held], problem: null, rows, timeline: lines, map: { ...map, tokens: map.tokens[held], prompt: (map.prompts ?? []).includes(held), gain, points } };
  }
}

async function unpacked(data) {
  const bytes = Uint8Array.from(atob(data.packed), (c) => c.charCodeAt(0));
  const buffer = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  const types = { f4: Float32Array, u1: Uint8Array, u2: Uint16Array, i2: Int16Array, u4: Uint32Array };
  return Object.fromEntries(data.arrays.map(([name, type, from, length]) => [name, new types[type](buffer, from, length)]));
}

// Every <div class="explorer-here"> of the page with its table in the script after it.
async function host(page) {
  for (const place of page.querySelectorAll(".explorer-here")) {
    try {
      const data = JSON.parse(place.nextElementSibling.textContent);
      render({ model: new Tabulated(data, await unpacked(data)), el: place });
    } catch (error) { // an old browser, or a damaged table: the picture for viewers without scripts is there
      const picture = place.querySelector("noscript")?.textContent ?? "", said = document.createElement("p");
      said.className = "problem";
      said.textContent = `The explorer cannot be shown in this browser (${error.message}); this is its first position.`;
      place.innerHTML = picture;
      place.prepend(said);
    }
  }
}

export default { render };
