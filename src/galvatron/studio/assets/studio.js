"use strict";
// Asks the planner whenever the form changes, one question at a time, and shows what it says. Text from the server goes
// into the page as text; only the sections' own HTML, which the server escapes, goes in as HTML.
(async () => {
  const el = (id) => document.getElementById(id);
  const set = (name) => el(`set-${name}`); // the control of an option of the plan
  const GIB = 2 ** 30, REST_MS = 120, IDLE_MS = 400, LONGEST = 1_000_000, LONGEST_ADDRESS = 8000;
  const files = { model: null, cluster: null };
  const kept = [];
  let about = null, shown = null, again = false, busy = false, timer = 0, turn = 0;

  const known = await (await fetch("/known")).json();
  const make = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const option = (value, text = value) => make("option", { value, textContent: text });

  // The form ---------------------------------------------------------------------------------------------------------
  el("models").append(...known.models.map((name) => option(name)));
  el("cluster").append(...known.clusters.map((each) => option(each.name, `${each.name} – ${each.device}`)));
  el("cluster").value = "h100";
  const choice = (name, label, help, input) => {
    input.id = `set-${name}`;
    return make("label", { className: "choice", title: help }, make("span", { textContent: label }), input);
  };
  for (const each of known.switches) {
    const input = make("select", {}, option("", each.default ? "default" : "default: off"), option("on"), option("off"));
    input.dataset.kind = "switch";
    el("switches").append(choice(each.name, each.title, each.help, input));
  }
  const select = (values) => make("select", {}, option("", "default"), ...values.map((value) => option(value)));
  const number = () => Object.assign(make("input", { type: "number", min: 1, step: 1, placeholder: "any" }));
  const more = [
    ["precision", "Precision", select(known.precisions)], ["optimizer", "Optimizer", select(known.optimizers)],
    ["schedule", "Schedule", select(known.schedules)], ["space", "Space", select(known.spaces)],
    ["pipeline", "Stages", number()], ["max_micro_batch", "Largest micro-batch", number()],
    ["lora", "LoRA rank", Object.assign(number(), { placeholder: "none" })],
    ["pin", "Pin", make("input", { placeholder: "layer=tp8" })], ["forbid", "Forbid", make("input", { placeholder: "tp:node" })],
  ];
  for (const [name, label, input] of more) el("more").append(choice(name, label, known.help[name], input));
  for (const name of ["devices", "node_link", "batch", "sequence_length"]) set(name).title = known.help[name];
  const numbers = ["devices", "batch", "sequence_length", "pipeline", "max_micro_batch", "lora"];
  const words = ["node_link", "precision", "optimizer", "schedule", "space", "pin", "forbid"];

  const lengthAt = (place) => 64 * 2 ** place;
  const batchAt = (place) => 2 ** (place - 1);
  const bytes = (b) => `${Number((b / GIB).toPrecision(3))} GiB`;

  function showSliders() {
    const all = about ? about.device_memory_bytes : null;
    const whole = set("memory").value === set("memory").max;
    el("memory-shown").value = whole ? (all ? `all ${bytes(all)}` : "all") : `${set("memory").value} GiB`;
    el("batch-shown").value = set("batch").value || "searched";
    el("length-shown").value = set("sequence_length").value || (about?.sequence_length ?? "the model's own");
    el("batch-slider").value = set("batch").value ? 1 + Math.round(Math.log2(set("batch").value)) : 0;
    el("length-slider").value = set("sequence_length").value ? Math.round(Math.log2(set("sequence_length").value / 64)) : 0;
  }

  /** The memory slider ends at what a device has, wherever it stands. */
  function fitMemory(budget) {
    const slider = set("memory"), most = about.device_memory_bytes / GIB;
    slider.step = most > 32 ? 0.5 : 0.25;
    slider.max = Math.ceil(most / slider.step) * slider.step;
    slider.value = budget >= about.device_memory_bytes ? slider.max : budget / GIB;
  }

  function memory() {
    const slider = set("memory");
    return slider.value === slider.max ? null : Math.round(Number(slider.value) * GIB);
  }

  function question() {
    const setup = { memory: memory() };
    for (const name of numbers) setup[name] = set(name).value === "" ? null : Number(set(name).value);
    for (const name of words) setup[name] = set(name).value.trim() || null;
    for (const { name } of known.switches) setup[name] = set(name).value === "" ? null : set(name).value === "on";
    if (files.cluster) setup.devices = setup.node_link = null;
    const figure = (name) => (el(name).value.trim() === "" ? null : Number(el(name).value));
    return {
      model: files.model ?? { name: el("model").value.trim() }, cluster: files.cluster ?? { name: el("cluster").value },
      setup: Object.fromEntries(Object.entries(setup).filter(([, value]) => value !== null)),
      tokens: figure("tokens"), price: figure("price"),
    };
  }

  function setFile(kind, file) {
    files[kind] = file;
    el(`${kind}-named`).hidden = file !== null;
    el(`${kind}-file`).hidden = file === null;
    if (file) el(`${kind}-file`).querySelector("code").textContent = file.file;
    if (kind === "cluster") {
      el("cluster-edit").hidden = file !== null;
      if (file && el("cluster-text").value !== file.text) el("cluster-text").value = file.text;
    }
  }

  /** Fill the form with a question that was asked. */
  function take(asked) {
    for (const kind of ["model", "cluster"]) {
      if (asked[kind].name) el(kind).value = asked[kind].name;
      setFile(kind, asked[kind].name ? null : asked[kind]);
    }
    for (const name of [...numbers, ...words]) set(name).value = asked.setup[name] ?? "";
    for (const { name } of known.switches) set(name).value = { true: "on", false: "off" }[asked.setup[name]] ?? "";
    const slider = set("memory");
    if (asked.setup.memory && (!about || asked.setup.memory > slider.max * GIB)) slider.max = asked.setup.memory / GIB + 1;
    slider.value = asked.setup.memory === undefined ? slider.max : asked.setup.memory / GIB;
    el("tokens").value = asked.tokens ?? "";
    el("price").value = asked.price ?? "";
    changed();
  }

  // Asking -----------------------------------------------------------------------------------------------------------
  async function post(address, asked) {
    const body = JSON.stringify(asked);
    const response = await fetch(address, { method: "POST", headers: { "content-type": "application/json" }, body });
    if (response.ok) return response;
    const said = await response.json().catch(() => ({ error: `status ${response.status}` }));
    throw new Error(said.error);
  }

  async function ask() {
    if (busy) { again = true; return; }
    busy = true;
    document.body.classList.add("asking");
    const asked = question(), mine = ++turn, begun = performance.now();
    el("status").textContent = known.traced.includes(asked.model.name)
      ? "Planning … (this model's layers are traced once, which takes some seconds)" : "Planning …";
    try {
      const answer = await (await post("/plan", asked)).json();
      show(asked, answer, performance.now() - begun);
    } catch (error) {
      refuse("That cannot be planned", error.message);
    }
    document.body.classList.remove("asking");
    busy = false;
    document.body.classList.toggle("settled", mine === turn); // what is shown answers what the form says
    if (again) { again = false; ask(); } else if (shown) (shown.answer.fits ? compare : advise)(mine);
  }

  /** What would fit, once it has been said that nothing does. */
  async function advise(mine) {
    const place = el("problem").querySelector("ul"), { asked } = shown;
    place.replaceChildren(make("li", { textContent: "Trying what would …", className: "soft" }));
    const said = await post("/advice", asked).then((response) => response.json()).catch((error) => ({ advice: [error.message] }));
    if (mine !== turn) return;
    place.replaceChildren(...(said.advice.length ? said.advice : ["No single change would."]).map((line) => {
      const item = make("li", { textContent: line });
      const act = remedy(line);
      if (act) item.append(make("button", { type: "button", textContent: "Try it", onclick: () => { act(); changed(); } }));
      return item;
    }));
  }

  function changed() {
    showSliders();
    document.body.classList.remove("settled");
    turn++;
    clearTimeout(timer);
    timer = setTimeout(ask, REST_MS);
  }

  // Showing ----------------------------------------------------------------------------------------------------------
  function clear() {
    shown = null;
    for (const id of ["answer", "what-ifs", "problem"]) el(id).hidden = true;
    el("sections").replaceChildren();
    drawFacts({});
  }

  function refuse(title, text) {
    clear();
    el("status").textContent = "";
    const place = el("problem");
    place.hidden = false;
    place.querySelector("h2").textContent = title;
    place.querySelector("p").textContent = text;
    place.querySelector("ul").replaceChildren();
  }

  /** What a line of advice asks for, as a change of the form; null: nothing that the form has. */
  function remedy(line) {
    const devices = line.match(/^more devices, (\d+)/);
    const grows = !files.cluster && known.clusters.find((each) => each.name === el("cluster").value)?.grows;
    if (devices) return !grows ? null : () => { set("devices").value = devices[1]; };
    const [, name, value] = line.match(/\(--([a-z0-9-]+)(?: ([^)]+))?\)$/) ?? [];
    const input = name ? set(name.replaceAll("-", "_")) : null;
    return input ? () => { input.value = value ?? "on"; input.closest("details")?.setAttribute("open", ""); } : null;
  }

  function show(asked, answer, waited) {
    clear();
    shown = { asked, answer };
    about = answer;
    const address = `#${encodeURIComponent(JSON.stringify(asked))}`;
    history.replaceState(null, "", address.length < LONGEST_ADDRESS ? address : "#");
    fitMemory(answer.budget_bytes);
    showSliders();
    if (!answer.fits) {
      refuse("It does not fit", answer.problem);
      shown = { asked, answer };
      return;
    }
    el("status").textContent = `Searched and proven in ${Math.round(answer.seconds * 1e3)} ms; answered in ${Math.round(waited)} ms.`;
    el("title").textContent = answer.title;
    el("subtitle").textContent = answer.subtitle;
    el("cards").replaceChildren(...[...answer.cards, ...money(answer.figures.answer)].map(card));
    el("said").replaceChildren();
    el("answer").hidden = false;
    el("sections").innerHTML = "";
    for (const section of answer.sections) {
      const place = make("section", {}, make("h2", { textContent: section.title }));
      place.insertAdjacentHTML("beforeend", section.content);
      el("sections").append(place);
    }
    drawFacts(answer.facts);
  }

  const card = ({ label, value, note }) => {
    const soft = (textContent) => make("span", { className: "soft", textContent });
    return make("div", { className: "card" }, soft(label), make("b", { textContent: value }), soft(note));
  };
  const money = (answer) => [
    answer.days === null ? null : { label: "time", value: `${spaced(answer.days)} days`, note: `${counted(answer.tokens)} tokens` },
    answer.cost === null ? null : { label: "cost", value: spaced(answer.cost), note: `${spaced(answer.device_hours)} device-hours` },
    answer.energy_kwh === null ? null : { label: "energy", value: `${spaced(answer.energy_kwh)} kWh`, note: "" },
  ].filter(Boolean);
  const counted = (value) => d3.format(".3~s")(value).replace("G", "B");
  const spaced = (value) => (value >= 100 ? d3.format(",.0f")(value) : d3.format(".3~r")(value));

  // What-ifs ---------------------------------------------------------------------------------------------------------
  const columns = {
    "samples/s": (figures) => round(figures.throughput),
    "of this": (figures, base) => `${Math.round((100 * figures.throughput) / base.throughput)}%`,
    "tokens/s": ({ answer }) => (answer.tokens_per_s === null ? null : d3.format(".3s")(answer.tokens_per_s)),
    days: ({ answer }) => (answer.days === null ? null : spaced(answer.days)),
    cost: ({ answer }) => (answer.cost === null ? null : spaced(answer.cost)),
    batch: (figures) => `${figures.micro_batches} × ${figures.batch / figures.micro_batches}`,
    stages: (figures) => figures.stages,
    memory: (figures) => figures.memory,
    parallelism: (figures) => figures.parallelism,
  };

  /** A line of the table; columns of which nothing is known of the plan that is shown are left out. */
  function row(label, figures, base, kind, buttons) {
    const line = make("tr", { className: kind }, make("td", { textContent: label, className: "label" }));
    const names = Object.keys(columns).filter((name) => columns[name](base, base) !== null);
    line.append(make("td", {}, ...buttons.map(([name, onclick]) => make("button", { type: "button", textContent: name, onclick }))));
    if (figures.fits === false) line.append(make("td", { textContent: figures.problem, className: "words", colSpan: names.length }));
    else line.append(...names.map((name) => make("td", { textContent: columns[name](figures, base) ?? "–", className: aligned(name) })));
    return line;
  }
  const aligned = (name) => (name === "parallelism" ? "" : "number");
  const round = (value) => Number(value.toPrecision(4)).toString();

  /** The plan that is shown, those that were kept, and single changes, each priced in turn until the form changes. */
  async function compare(mine) {
    const { asked, answer } = shown, base = answer.figures;
    const names = Object.keys(columns).filter((name) => columns[name](base, base) !== null);
    const titles = names.map((name) => make("th", { textContent: name, className: aligned(name) }));
    el("what-ifs").querySelector("thead").replaceChildren(make("tr", {}, make("th"), make("th"), ...titles));
    const body = el("what-ifs").querySelector("tbody");
    const name = `${base.model}, ${base.devices} × ${answer.device}, ${base.budget}`;
    const lines = () => kept.map((each, place) => row(each.name, each.figures, base, "kept",
      [["Show", () => take(each.asked)], ["✕", () => { kept.splice(place, 1); compare(turn); }]]));
    const keep = () => { kept.push({ name: `${name}, batch ${base.batch}`, figures: base, asked }); compare(turn); };
    body.replaceChildren(row(`this: ${name}`, base, base, "ours", [["Keep", keep]]), ...lines());
    el("what-ifs").hidden = false;
    await new Promise((done) => setTimeout(done, IDLE_MS)); // who still moves something waits for no what-ifs
    if (mine !== turn || shown?.answer !== answer) return;
    for (const other of answer.what_ifs) {
      if (other.priced === undefined) {
        try {
          const said = await (await post("/price", other.question)).json();
          other.priced = said.fits ? said.figures : { fits: false, problem: said.problem };
        } catch (error) {
          other.priced = { fits: false, problem: error.message };
        }
      }
      if (mine !== turn || shown?.answer !== answer) return;
      body.append(row(other.label, other.priced, base, "what-if", [["Show", () => take(other.question)]]));
    }
    el("what-ifs").dataset.done = mine;
  }

  // Files ------------------------------------------------------------------------------------------------------------
  for (const kind of ["model", "cluster"]) {
    el(`${kind}-upload`).addEventListener("change", async (event) => {
      const [file] = event.target.files;
      if (!file) return;
      event.target.value = "";
      if (file.size > LONGEST) return refuse("That cannot be planned", `${file.name} has ${file.size} bytes; expected at most ${LONGEST}`);
      setFile(kind, { file: file.name, text: await file.text() });
      changed();
    });
    el(`${kind}-drop`).addEventListener("click", () => { setFile(kind, null); changed(); });
  }
  el("cluster-edit").addEventListener("click", () => {
    if (about) setFile("cluster", { file: "cluster.toml", text: about.cluster_toml });
  });
  el("cluster-text").addEventListener("input", () => { files.cluster = { file: "cluster.toml", text: el("cluster-text").value }; });

  el("downloads").append(...known.downloads.map(({ file, about: text }) => make("button", {
    type: "button", textContent: `Download ${file}`, title: text,
    onclick: async () => {
      try {
        const { text: content, said } = await (await post(`/download/${file}`, shown.asked)).json();
        el("said").replaceChildren(...said.map((line) => make("li", { textContent: line })));
        const link = make("a", { href: URL.createObjectURL(new Blob([content])), download: file });
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
      } catch (error) {
        el("status").textContent = error.message;
      }
    },
  })));

  el("batch-slider").addEventListener("input", (event) => {
    set("batch").value = Number(event.target.value) ? batchAt(Number(event.target.value)) : "";
  });
  el("length-slider").addEventListener("input", (event) => {
    set("sequence_length").value = Number(event.target.value) ? lengthAt(Number(event.target.value)) : "";
  });
  el("cluster").addEventListener("input", () => {
    for (const name of ["devices", "node_link"]) set(name).value = "";
    set("memory").value = set("memory").max;
  });
  el("model").addEventListener("change", () => changed());
  el("question").addEventListener("input", (event) => {
    if (event.target.type === "file" || (event.target === el("model") && !known.models.includes(el("model").value))) return;
    changed(); // but not for half a model's name
  });
  el("question").addEventListener("submit", (event) => event.preventDefault());

  /** The question in the address, so that a reload or a bookmark asks it again. */
  function addressed() {
    try {
      const asked = JSON.parse(decodeURIComponent(location.hash.slice(1)));
      return asked.model && asked.cluster ? { setup: {}, ...asked } : null;
    } catch {
      return null;
    }
  }
  const asked = addressed();
  if (asked) take(asked); else ask();
})();
