"use strict";
// Draws the charts of a page from the JSON beside it, or from what drawFacts is given. Every mark has an aria-label with
// its value.
(() => {
  let facts = JSON.parse(document.getElementById("facts")?.textContent ?? "{}");
  const style = { "--plot-background": "var(--panel)", background: "transparent", fontSize: "12px" };
  const round = (value) => Number(value.toPrecision(3)).toString();
  const seconds = (s) => (s >= 1 ? `${round(s)} s` : s >= 1e-3 ? `${round(s * 1e3)} ms` : `${round(s * 1e6)} µs`);
  const bytes = (b) => (b >= 2 ** 30 ? `${round(b / 2 ** 30)} GiB` : `${round(b / 2 ** 20)} MiB`);
  const count = (n) => (n >= 1e4 ? d3.format(".3s")(n) : round(n));
  const byStage = (stages) => stages.map((stage) => `stage ${stage}`);
  const colours = {
    forward: "#4269d0", backward: "#3ca951", communication: "#ff725c", receive: "#efb118", "gradient sync": "#a463f2",
    optimizer: "#97bbf5", wait: "var(--line)", steady: "#9498a0",
  };

  /** Draw one chart into the element of this name, where the page has it and the facts too. */
  function chart(name, draw) {
    const place = document.getElementById(name);
    if (!place || !facts[name]) return;
    const width = Math.max(280, place.clientWidth);
    place.replaceChildren(draw(facts[name], width, place));
  }

  function bars(width, rows, options) {
    return Plot.plot({ width, height: 52 + 30 * rows, marginTop: 8, marginBottom: 42, style, ...options });
  }

  /** Whole numbers to write on an axis. */
  const whole = (most, width) => d3.ticks(0, most, Math.max(3, width / 90)).filter(Number.isInteger);

  /** Room for the longest of some names, left of a chart. */
  const room = (names) => Math.max(92, 14 + 6.8 * Math.max(...names.map((name) => name.length)));

  function layers(data, width) {
    return bars(width, data.stages.length, {
      marginLeft: 60,
      x: { label: "layer", domain: [0, data.layers], nice: false, ticks: whole(data.layers, width) },
      y: { domain: byStage(data.stages), label: null },
      color: { legend: true, domain: data.strategies, scheme: "observable10" },
      marks: [
        Plot.barX(data.runs, {
          x1: "begin", x2: "end", y: (d) => `stage ${d.stage}`, fill: "strategy", insetLeft: 0.5, insetRight: 0.5,
          title: (d) => `layers ${d.begin} to ${d.end - 1}: ${d.kind}\n${d.strategy}\n${d.reason}`, tip: true,
          ariaLabel: (d) => `stage ${d.stage}, layers ${d.begin} to ${d.end - 1}, ${d.kind}, ${d.strategy}`,
        }),
      ],
    });
  }

  const view = { from: 0, to: 1 };

  function timeline(data, width, place) {
    const from = view.from * data.end_s, to = view.to * data.end_s;
    const shown = data.spans.filter((d) => d.end > from && d.start < to);
    const many = data.stages.length > 24;
    const figure = Plot.plot({
      width, height: 52 + (many ? 14 : 26) * data.stages.length, style, marginLeft: 60, marginTop: 8, marginBottom: 42,
      x: { domain: [from, to], label: "seconds", nice: false },
      y: { domain: byStage(data.stages), label: null },
      color: { legend: true, domain: Object.keys(colours).filter((key) => data.kinds.includes(key)),
        range: Object.keys(colours).filter((key) => data.kinds.includes(key)).map((key) => colours[key]) },
      marks: [
        Plot.barX(shown, {
          x1: "start", x2: "end", y: (d) => `stage ${d.stage}`, fill: "kind", insetTop: 1, insetBottom: 1,
          title: (d) => `${d.name}\n${seconds(d.end - d.start)}, from ${seconds(d.start)}`, tip: true, clip: true,
          ariaLabel: (d) => `stage ${d.stage}, ${d.name}, ${d.kind}`,
        }),
      ],
    });
    const svg = d3.select(figure).selectAll("svg").filter(function () { return this.querySelector("[aria-label='bar']"); });
    const scale = figure.scale("x");
    svg.call(
      d3.drag().container(function () { return this; })
        .filter((event) => !event.touches || event.touches.length > 1)
        .on("drag", (event) => move(-event.dx * (view.to - view.from) / (scale.range[1] - scale.range[0]), 1))
    );
    svg.on("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      const at = (scale.invert(d3.pointer(event)[0])) / data.end_s;
      move(0, (event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, at);
    });
    svg.style("cursor", "grab");
    return figure;
  }

  /** Move the timeline by a share of the iteration, and scale what is seen around a place. */
  function move(by, factor, around = (view.from + view.to) / 2) {
    const size = Math.min(1, Math.max(1e-5, (view.to - view.from) * factor));
    let from = around - (around - view.from) * (size / (view.to - view.from)) + by;
    from = Math.min(1 - size, Math.max(0, from));
    view.from = from;
    view.to = from + size;
    chart("timeline", timeline);
  }

  function stacked(data, width, { format, label, unit = 1, limit }) {
    return bars(width, data.rows.length, {
      marginLeft: 92,
      marginRight: 16,
      x: { label, transform: (value) => value / unit, ticks: Math.max(3, width / 110) },
      y: { domain: data.rows, label: null },
      color: { legend: true, domain: data.kinds,
        range: data.kinds.map((kind, place) => (kind === "wait" ? colours.wait : d3.schemeObservable10[place % 10])) },
      marks: [
        Plot.barX(data.parts, Plot.stackX({
          x: "value", y: "row", fill: "kind", order: data.kinds,
          title: (d) => `${d.row}: ${d.kind}\n${format(d.value)}`, tip: true,
          ariaLabel: (d) => `${d.row}, ${d.kind}, ${format(d.value)}`,
        })),
        limit ? Plot.ruleX([limit], { stroke: "currentColor", strokeDasharray: "4,3", ariaLabel: () => "budget" }) : null,
        Plot.ruleX([0]),
      ],
    });
  }

  const GIB = 2 ** 30;
  const memory = (data, width) =>
    stacked(data, width, { format: bytes, label: "GiB at the peak; dashed: the budget", unit: GIB, limit: data.budget });
  const times = (data, width) => stacked(data, width, { format: seconds, label: "seconds of an iteration" });

  function spaces(data, width) {
    return bars(width, data.length, {
      marginLeft: 70, marginRight: 60,
      x: { label: "samples/s", ticks: Math.max(3, width / 110) },
      y: { domain: data.map((d) => d.space), label: null },
      marks: [
        Plot.barX(data, {
          x: (d) => d.throughput ?? 0, y: "space", fill: (d) => (d.ours ? "var(--accent)" : "#9498a0"),
          title: (d) => `${d.space}\n${d.obstacle}`, tip: true,
          ariaLabel: (d) => `${d.space}, ${d.throughput ?? "no plan"}`,
        }),
        Plot.text(data, { x: (d) => d.throughput ?? 0, y: "space", dx: 6, textAnchor: "start",
          text: (d) => (d.throughput == null ? "no plan" : round(d.throughput)) }),
        Plot.ruleX([0]),
      ],
    });
  }

  function curve(data, width, format, label) {
    return Plot.plot({
      width, height: 230, style, marginLeft: 52, marginBottom: 58, grid: true,
      x: { label, type: "log", tickFormat: format, ticks: data.map((d) => d.at), tickRotate: data.length > 6 ? -35 : 0 },
      y: { label: "samples/s", zero: true, insetTop: 8 },
      marks: [
        Plot.lineY(data.filter((d) => d.throughput != null && d.best), { x: "at", y: "throughput", stroke: "var(--accent)" }),
        Plot.dot(data.filter((d) => d.throughput != null), {
          x: "at", y: "throughput", r: (d) => (d.ours ? 6 : 3.5), fill: "var(--accent)",
          title: (d) => `${format(d.at)}: ${round(d.throughput)} samples/s\n${d.note}`, tip: true,
          ariaLabel: (d) => `${format(d.at)}, ${d.throughput}`,
        }),
        Plot.dot(data.filter((d) => d.throughput == null), {
          x: "at", y: 0, symbol: "times", stroke: "#ff725c", title: (d) => `${format(d.at)}: ${d.note}`, tip: true,
          ariaLabel: (d) => `${format(d.at)}, nothing fits`,
        }),
        Plot.ruleY([0]),
      ],
    });
  }

  function grouped(data, width, { format, label, unit = 1 }) {
    return Plot.plot({
      width, height: 60 + 22 * data.kinds.length * data.rows.length, style,
      marginLeft: room(data.rows), marginRight: 16, marginBottom: 42,
      x: { label, transform: (value) => value / unit, ticks: Math.max(3, width / 110) },
      y: { axis: null, domain: data.kinds }, fy: { domain: data.rows, label: null, axis: "left" },
      color: { legend: true, domain: data.kinds, range: ["#97bbf5", "#3ca951", "#efb118"] },
      marks: [
        Plot.barX(data.parts, {
          x: "value", y: "kind", fy: "row", fill: "kind", title: (d) => `${d.row}, ${d.kind}: ${format(d.value)}`, tip: true,
          ariaLabel: (d) => `${d.row}, ${d.kind}, ${format(d.value)}`,
        }),
        Plot.ruleX([0]),
      ],
    });
  }

  function losses(data, width) {
    return Plot.plot({
      width, height: 240, style, marginLeft: 52, marginBottom: 42, grid: true,
      x: { label: "step" }, y: { label: "loss" },
      color: { legend: true, domain: [...new Set(data.map((d) => d.kind))] },
      marks: [
        Plot.lineY(data, { x: "step", y: "loss", stroke: "kind", tip: true }),
        Plot.dot(data.length > 60 ? data.filter((d) => d.kind === "held out") : data, { x: "step", y: "loss", fill: "kind", r: 2.5,
          ariaLabel: (d) => `step ${d.step}, ${d.kind}, ${d.loss}` }),
      ],
    });
  }

  function comparison(data, width) {
    return Plot.plot({
      width, height: 300, style, marginLeft: 52, marginBottom: 42, grid: true,
      x: { label: "memory of a device", type: "point", domain: data.budgets.map(bytes) },
      y: { label: "samples/s", zero: true },
      color: { legend: true, domain: data.spaces, scheme: "observable10" },
      marks: [
        Plot.lineY(data.cells, { x: (d) => bytes(d.memory), y: "throughput", stroke: "space", strokeWidth: (d) => d.space === "full" ? 3 : 1.5 }),
        Plot.dot(data.cells, {
          x: (d) => bytes(d.memory), y: "throughput", fill: "space", r: 4,
          title: (d) => `${d.space} at ${bytes(d.memory)}\n${round(d.throughput)} samples/s, batch ${d.batch}`, tip: true,
          ariaLabel: (d) => `${d.space}, ${bytes(d.memory)}, ${d.throughput}`,
        }),
      ],
    });
  }

  function draw() {
    chart("layers", layers);
    chart("timeline", timeline);
    chart("memory", memory);
    chart("times", times);
    chart("spaces", spaces);
    chart("batches", (data, width) => curve(data, width, count, "batch"));
    chart("budgets", (data, width) => curve(data, width, bytes, "memory of a device"));
    chart("comparison", comparison);
    chart("losses", losses);
    chart("phases", (data, width) => grouped(data, width, { format: seconds, label: "seconds of an iteration" }));
    chart("peaks", (data, width) => grouped(data, width, { format: bytes, label: "GiB of tensors at the peak", unit: GIB }));
  }

  const tools = { "zoom-in": () => move(0, 0.5), "zoom-out": () => move(0, 2), "zoom-all": () => move(0, 1e9, 0.5),
    "go-left": () => move(-(view.to - view.from) / 3, 1), "go-right": () => move((view.to - view.from) / 3, 1) };
  document.addEventListener("click", (event) => tools[event.target.id]?.());
  let width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    draw();
  }).observe(document.body);
  /** Draw other facts into the places that the page has for them now. */
  globalThis.drawFacts = (others) => {
    facts = others;
    Object.assign(view, { from: 0, to: 1 });
    draw();
  };
  draw();
})();
