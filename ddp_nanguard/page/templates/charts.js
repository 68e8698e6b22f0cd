"use strict";
// -- charts ---------------------------------------------------------------------------------------------------------

const MISSING = -128, ZERO = -127, INF = 126, NAN = 127;
const paper = window.matchMedia("print"), dark = window.matchMedia("(prefers-color-scheme: dark)");
const themes = {
  light: { text: "#1c2128", dim: "#5a6472", line: "#d9dde3", back: "#ffffff", nan: "#d55e00", inf: "#f0b400", zero: "#c9ced6",
    scale: [[0, "#edf3fa"], [0.35, "#a9cbe8"], [0.7, "#3f83c0"], [1, "#0a2f5c"]],
    lines: ["#0b5cad", "#a0497f", "#00795a", "#6b6100"] },
  dark: { text: "#e4e7eb", dim: "#9aa5b3", line: "#343b45", back: "#14171c", nan: "#ff7a1a", inf: "#ffd23f", zero: "#4a525d",
    scale: [[0, "#16283d"], [0.35, "#22527f"], [0.7, "#5f9fd8"], [1, "#dcecfb"]],
    lines: ["#7ab8f5", "#e39cc6", "#4fc9a3", "#d8cb5a"] },
};

let printing = false;

function onPaper() { return printing || paper.matches; }

function theme() { return dark.matches && !onPaper() ? themes.dark : themes.light; }

// plotly reads a few tags in texts; names of layers are data
function plain(text) { return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"); }

// a long name in lines, broken after its dots where that is possible
function wrapped(text, limit) {
  const lines = [""];
  for (const part of text.match(/[^. ]*[. ]?/g)) {
    if (lines[lines.length - 1].length + part.length > limit && lines[lines.length - 1] !== "") lines.push("");
    lines[lines.length - 1] += part;
  }
  return lines.flatMap((line) => line.match(new RegExp(`.{1,${limit}}`, "gu")) ?? [""]).map(plain).join("<br>");
}

function numberText(value) { return typeof value === "number" ? String(Number(value.toPrecision(5))) : { nan: "NaN", inf: "Inf", "-inf": "-Inf" }[value]; }

const PAPER = 680;  // pixels between the margins of A4, and of Letter

function room() { return onPaper() ? PAPER : document.querySelector("main").clientWidth; }

function layout(colors, more) {
  return { autosize: true, width: onPaper() ? PAPER : undefined, paper_bgcolor: colors.back, plot_bgcolor: colors.back, dragmode: false, showlegend: false,
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colors.text },
    hoverlabel: { bgcolor: colors.back, bordercolor: colors.dim, font: { color: colors.text, size: 12 }, align: "left", namelength: -1 },
    margin: { l: 8, r: 12, t: 8, b: 8 }, ...more };
}

const config = { displayModeBar: false, scrollZoom: false, doubleClick: false };

function timelineFigure(data, colors, narrow) {
  const finite = data.series.flatMap((each) => each.values).filter((value) => typeof value === "number" && value !== 0).map(Math.abs);
  if (data.weights) finite.push(data.weights);
  const powers = finite.length ? finite.map(Math.log10) : [0];
  const low = Math.floor(Math.min(...powers) - 0.15), high = Math.max(...powers);
  const limit = data.limit === null ? null : Math.log10(data.limit.value);
  const isNear = limit !== null && limit - high < 8;
  const top = Math.ceil((isNear ? Math.max(limit, high) : high) + (limit === null ? 0.2 : 0.4)), space = Math.max(0.2, (top - low) * 0.06);
  const last = data.steps[data.steps.length - 1];
  const bads = data.series.filter((each) => each.values.some((value) => typeof value === "string"));
  const edge = (each) => top + space * (bads.length - bads.indexOf(each)), end = top + space * (bads.length + 0.6);
  const traces = data.series.flatMap((each, index) => {
    const color = colors.lines[index % colors.lines.length], symbol = ["circle", "square", "diamond", "triangle-up"][index % 4];
    const y = each.values.map((value) => (typeof value === "number" && value !== 0 ? Math.abs(value) : null));
    const bad = data.steps.filter((_, at) => typeof each.values[at] === "string");
    const texts = each.values.map((value) => (value === null ? "" : numberText(value)));
    return [
      { type: "scatter", mode: "lines+markers", name: each.legend, x: data.steps, y, customdata: texts, line: { color, width: 2, dash: ["solid", "dash", "dot", "dashdot"][index % 4] },
        marker: { color, size: 7, symbol }, hovertemplate: `${each.name} %{customdata}<extra></extra>`, showlegend: true },
      { type: "scatter", mode: "markers", x: bad, y: bad.map(() => 10 ** edge(each)), customdata: bad.map((step) => texts[data.steps.indexOf(step)]),
        marker: { color, size: 11, symbol: ["x", "cross", "star", "hexagram"][index % 4], line: { color: colors.nan, width: 1.5 } },
        hovertemplate: `${each.name} %{customdata}<extra></extra>`, showlegend: false },
    ];
  });
  if (data.weights) traces.push({ type: "scatter", mode: "markers", name: "weights in the dump", x: [last], y: [data.weights],
    marker: { color: colors.text, size: 9, symbol: "diamond-open", line: { width: 2 } }, hovertemplate: "largest weight %{y:.4g}<extra></extra>", showlegend: true });
  const shapes = [{ type: "line", x0: last, x1: last, yref: "paper", y0: 0, y1: 1, line: { color: colors.nan, width: 1, dash: "dot" }, layer: "below" }];
  const notes = [];
  if (isNear) {
    shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: data.limit.value, y1: data.limit.value, line: { color: colors.text, width: 1.5, dash: "longdash" } });
    notes.push({ xref: "paper", x: 0, y: limit, xanchor: "left", yanchor: "bottom", showarrow: false, text: `largest ${plain(data.limit.dtype)}: ${numberText(data.limit.value)}`, font: { color: colors.dim, size: 11 } });
  } else if (limit !== null) {
    notes.push({ xref: "paper", x: 0, y: top, xanchor: "left", yanchor: "top", showarrow: false, text: `↑ largest ${plain(data.limit.dtype)}: ${numberText(data.limit.value)}, ${Math.round(limit - high)} decades above`, font: { color: colors.dim, size: 11 }, bgcolor: colors.back });
  }
  for (const each of bads) notes.push({ x: last, y: edge(each), xanchor: "right", xshift: -10, showarrow: false, text: `${plain(each.name)}: ${numberText(each.values[each.values.length - 1]) ?? "NaN or Inf"}`, font: { color: colors.nan, size: 11 } });
  const ticks = labelled(data.steps.map(String), (narrow ? 0.85 : 0.9) * room());
  return { traces, layout: layout(colors, { height: narrow ? 320 : 360, hovermode: "x unified", showlegend: true, shapes, annotations: notes,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } }, margin: { l: 8, r: 14, t: 8, b: 8 },
    xaxis: { title: { text: "step", standoff: 6 }, tickvals: ticks.places.map((index) => data.steps[index]), ticktext: ticks.texts, tickangle: 0, gridcolor: colors.line, zeroline: false, fixedrange: true, automargin: true, range: [data.steps[0] - 0.5, last + 0.5] },
    yaxis: { type: "log", range: [low, bads.length ? end : top], gridcolor: colors.line, exponentformat: "power", dtick: Math.max(1, Math.ceil((end - low) / 8)), fixedrange: true, automargin: true } }) };
}

function unpacked(data) {
  const bytes = Uint8Array.from(atob(data.bins), (letter) => letter.charCodeAt(0));
  return new Int8Array(bytes.buffer);
}

function decade(bin) { return bin % 2 === 0 ? `1e${bin / 2}` : `${(10 ** (((bin % 2) + 2) % 2 / 2)).toFixed(0)}e${Math.floor(bin / 2)}`; }

function cellText(bin) {
  if (bin === NAN || bin === INF || bin === ZERO) return { [NAN]: "NaN", [INF]: "Inf", [ZERO]: "0" }[bin];
  return bin === MISSING ? "not there" : `${decade(bin)} to ${decade(bin + 1)}`;
}

function legend(colors, kinds, ends) {
  const swatch = (background, text) => `<span><i style="background:${background}"></i>${text}</span>`;
  const ramp = `linear-gradient(90deg, ${colors.scale.map((stop) => `${stop[1]} ${stop[0] * 100}%`).join(", ")})`;
  const parts = ends === null ? [] : [`<span>${decade(ends[0])} <i style="width:5rem;background:${ramp};margin:0 .2rem"></i> ${decade(ends[1] + 1)}</span>`];
  if (kinds.has(NAN)) parts.push(swatch(colors.nan, "NaN"));
  if (kinds.has(INF)) parts.push(swatch(colors.inf, "Inf"));
  if (kinds.has(ZERO)) parts.push(swatch(colors.zero, "0"));
  if (kinds.has(MISSING)) parts.push(swatch(colors.back, "not there"));
  return parts.join("");
}

// columns that are narrower than a pixel or two are told together by the worst of them: bytes grow from nothing to NaN
function pooled(data, most) {
  const bins = unpacked(data), width = data.columns.length, together = Math.ceil(width / most), count = Math.ceil(width / together);
  const lines = data.rows.map((_, row) => {
    const line = new Int8Array(count).fill(MISSING);
    for (let column = 0; column < width; column += 1) line[Math.floor(column / together)] = Math.max(line[Math.floor(column / together)], bins[row * width + column]);
    return Array.from(line);
  });
  const names = Array.from({ length: count }, (_, index) => {
    const first = data.columns[index * together], last = data.columns[Math.min(width, (index + 1) * together) - 1];
    return first === last ? String(first) : `${first} to ${last}, the worst`;
  });
  const ticks = Array.from({ length: count }, (_, index) => String(data.columns[index * together]));
  return { lines, names, ticks, origin: data.origin === null ? null : [data.origin[0], Math.floor(data.origin[1] / together)] };
}

// labels that have room: every second or third of a few, the last one among them; round numbers of many
function labelled(labels, pixels) {
  const every = Math.ceil((labels.length * (10 + 7 * Math.max(...labels.map((label) => label.length)))) / pixels);
  if (every > 4) return roundNumbers(labels, every);
  const places = labels.map((_, index) => index).filter((index) => (labels.length - 1 - index) % every === 0);
  return { places, texts: places.map((index) => labels[index]) };
}

function roundNumbers(labels, every) {
  const numbers = labels.map(Number), wanted = (every * (numbers[numbers.length - 1] - numbers[0])) / numbers.length;
  const power = 10 ** Math.floor(Math.log10(wanted)), step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= wanted);
  const places = [], texts = [];
  numbers.forEach((number, index) => {
    const round = Math.floor(number / step) * step;
    if (index > 0 && round <= numbers[index - 1]) return;
    if (index === 0 && round !== number) return;
    places.push(round < number ? index - 1 : index);  // a column may stand for several numbers
    texts.push(String(round));
  });
  return { places, texts };
}

function mapFigure(data, colors, narrow, title) {
  const pixels = (narrow ? 0.55 : 0.75) * room();
  const { lines, names, ticks, origin } = pooled(data, Math.floor(pixels / (onPaper() ? 2 : 1.5)));
  const rows = lines.length, width = names.length, isFine = width > 64;
  const values = lines.map((line) => line.map((bin) => (bin <= ZERO || bin >= INF ? null : bin)));
  const marks = lines.map((line) => line.map((bin) => (bin === NAN ? 2 : bin === INF ? 1 : bin === ZERO ? 0 : null)));
  const finite = values.flat().filter((bin) => bin !== null);
  const ends = finite.length ? finite.reduce(([low, high], bin) => [Math.min(low, bin), Math.max(high, bin)], [NAN, MISSING]) : null;
  const heads = data.rows.map((row) => `<b>${wrapped(row.text, narrow ? 34 : 100)}</b>`);
  const text = lines.map((line, row) => line.map((bin, column) => `${heads[row]}<br>${title} ${names[column]}: ${cellText(bin)}`));
  const size = Math.max(onPaper() ? 0.5 : 1.5, Math.min(20, (onPaper() ? 700 : 900) / rows)), every = Math.ceil(13 / size);
  const x = names.map((_, column) => column), y = lines.map((_, row) => row);
  const begin = origin === null ? null : origin[0];
  const at = y.filter((row) => row === begin || (row % every === 0 && (begin === null || Math.abs(row - begin) >= every)));
  const short = (row) => plain(narrow ? data.rows[row].narrow : data.rows[row].short);
  const map = { type: "heatmap", x, y, text, hovertemplate: "%{text}<extra></extra>", showscale: false, hoverongaps: false, xgap: isFine ? 0 : 1, ygap: size > 8 && !isFine ? 1 : 0 };
  const paints = [colors.zero, colors.zero, colors.inf, colors.inf, colors.nan, colors.nan];
  const traces = [
    { ...map, z: values, colorscale: colors.scale, zmin: ends === null ? 0 : ends[0], zmax: ends === null ? 1 : Math.max(ends[1], ends[0] + 1) },
    { ...map, z: marks, colorscale: [0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1].map((stop, index) => [stop, paints[index]]), zmin: 0, zmax: 2 },
  ];
  if (isFine) {  // one column is a pixel or two: say where to look
    const bad = x.filter((column) => marks.some((line) => line[column] > 0));
    traces.push({ type: "scatter", mode: "markers", x: bad, y: bad.map(() => -0.5 - 9 / size), text: bad.map((column) => names[column]), marker: { symbol: "triangle-down", size: 9, color: colors.nan }, hovertemplate: `${title} %{text}: NaN or Inf<extra></extra>`, cliponaxis: false });
  }
  const shapes = origin === null ? [] : [{ type: "rect", x0: origin[1] - 0.5, x1: origin[1] + 0.5, y0: begin - 0.5, y1: begin + 0.5, line: { color: colors.text, width: size < 8 || width > 128 ? 1.5 : 2.5 } }];
  const share = Math.min(1, Math.max(0.15, (width * 44) / pixels)), { places, texts } = labelled(ticks, pixels * share);
  const axis = { fixedrange: true, automargin: true, showgrid: false, zeroline: false };
  return { traces, legend: legend(colors, new Set(lines.flat()), ends), layout: layout(colors, { height: Math.max(90, rows * size) + 64, shapes,
    xaxis: { ...axis, domain: [0, share], range: [-0.5, width - 0.5], title: { text: title, standoff: 6 }, tickvals: places, ticktext: texts, tickangle: 0 },
    yaxis: { ...axis, range: [rows - 0.5, isFine ? -0.5 - 16 / size : -0.5], tickvals: at, ticktext: at.map((row) => (row === begin ? `<b>${short(row)}</b>` : short(row))), tickfont: { size: 11 } } }) };
}

function charts(data) {
  const draw = () => {
    const colors = theme(), narrow = room() < 600;
    const show = (id, figure) => {
      const place = document.getElementById(id);
      if (place === null || figure === null) return;
      if (figure.legend !== undefined) place.parentElement.querySelector("[data-legend]").innerHTML = figure.legend;
      Plotly.react(place, figure.traces, figure.layout, { ...config, responsive: !onPaper() });
    };
    show("chart-timeline", data.timeline === null ? null : timelineFigure(data.timeline, colors, narrow));
    show("chart-steps", data.maps.steps === null ? null : mapFigure(data.maps.steps, colors, narrow, "step"));
    show("chart-ranks", data.maps.ranks === null ? null : mapFigure(data.maps.ranks, colors, narrow, "rank"));
    document.documentElement.classList.add("drawn");
  };
  draw();
  let was = room();
  window.addEventListener("resize", () => { if ((was < 600) !== (room() < 600)) draw(); was = room(); });
  dark.addEventListener("change", draw);
  paper.addEventListener("change", draw);
  window.addEventListener("beforeprint", () => { printing = true; draw(); });
  window.addEventListener("afterprint", () => { printing = false; draw(); });
}

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function start() {
  const script = document.createElement("script");
  script.textContent = await unpack("packed-plotly");
  document.head.append(script);
  charts(JSON.parse(await unpack("packed-charts")));
}

function withoutCharts(error) {
  console.warn(`no charts: ${error}`);
  for (const place of document.querySelectorAll(".chart")) {
    const line = document.createElement("p");
    line.className = "remark";
    line.textContent = "This browser cannot unpack the charts (no DecompressionStream, as in those before 2023); the tables hold the numbers.";
    place.replaceWith(line);
  }
}

start().catch(withoutCharts);
