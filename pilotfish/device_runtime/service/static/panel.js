// The panel: polls the service's state each second, and shows it or that the service is away.

import { ask } from "./service.js";

const EVERY = 1000; // ms between two polls
const LONGEST = 8000; // ms: longest pause while the service is away, and pause of a hidden page
const PATIENCE = 5000;
const RECENT_S = 10; // older readings show their age
const STAGES = ["draft", "encode", "uplink", "queue", "verify", "downlink", "settle"];

const at = (id) => document.getElementById(id);

/** Poll for ever, less often while the page is hidden. */
export async function watch() {
  buildStages();
  let pause = EVERY;
  for (;;) {
    try {
      const response = await ask("status", { patience: PATIENCE });
      if (!response.ok) throw new Error(`status ${response.status}`);
      show(await response.json());
      at("unreachable").hidden = true;
      pause = EVERY;
    } catch {
      pause = Math.min(2 * pause, LONGEST);
      missing(pause);
    }
    await waited(document.hidden ? LONGEST : pause);
  }
}

/** Wait `pause` ms, or until the page becomes visible or the network returns. */
function waited(pause) {
  return new Promise((resolve) => {
    const timer = setTimeout(done, pause);
    document.addEventListener("visibilitychange", done);
    addEventListener("online", done);
    function done() {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", done);
      removeEventListener("online", done);
      resolve();
    }
  });
}

function missing(pause) {
  const banner = at("unreachable");
  put(banner, `The service does not answer. Trying again in ${Math.round(pause / 1000)} s.`);
  banner.hidden = false;
  pill("gone", "no service");
}

/** Format the accepted share of each source of hints, "device 93 %, text 40 %"; null: no hints. */
function hinted(hints) {
  const shares = Object.entries(hints ?? {}).map(
    ([source, { drafted, accepted }]) => `${source} ${percent(accepted / drafted)}`,
  );
  return shares.join(", ") || null;
}

function show(status) {
  const { link, acceptance, rounds, protocol, lanes, energy } = status;
  showLink(link, status.edge);
  put(at("acceptance"), percent(acceptance.recent));
  at("acceptance-meter").value = acceptance.recent ?? 0;
  put(at("acceptance-total"), percent(acceptance.total));
  optional("hints", hinted(status.hints), (shares) => shares);
  optional("forgiven", status.forgiven || null, (count) => `${count} drafted tokens`);
  optional("deviation", status.deviation || null, (mean) => `${percent(mean)} a position`);
  put(at("round-tokens"), rounds ? rounds.tokens.toFixed(2) : "–");
  put(at("speed"), status.last ? `${status.last.tokens_per_s.toFixed(1)} tokens/s` : "–");
  const window = protocol?.window ? `, window ${protocol.window}` : "";
  put(at("protocol"), protocol ? protocol.name + window : "–");
  put(at("reason"), protocol?.reason ?? "");
  showStages(rounds);
  const waiting = lanes.waiting ? `, ${lanes.waiting} waiting` : "";
  put(at("lanes"), `${lanes.running} of ${lanes.total}${waiting}`);
  optional("power", energy?.watts, (watts) => `${watts.toFixed(1)} W`);
  const { count, recent } = status.recoveries;
  const last = recent.at(-1);
  const when = last ? `, last ${span(last.ago_s)} ago for ${seconds(last.lost_s)}` : "";
  put(at("recoveries"), count ? `${count} ×${when}` : "never");
  for (const name of ["edge", "target", "drafter", "software"]) put(at(name), status[name] ?? "–");
}

function showLink(link, edge) {
  if (link.up === null || !edge) {
    pill("unknown", edge ? "link unknown" : "no edge");
    put(at("link-state"), edge ? "unknown" : "no edge: the drafter is alone");
  } else {
    const since = `${link.state} for ${span(link.since_s)}`;
    pill(link.up ? "up" : "down", `link ${since}`);
    put(at("link-state"), since);
  }
  optional("link-mend", link.up ? null : link.message, (message) =>
    link.remedy ? `${message} To mend it: ${link.remedy}.` : message,
  );
  const jitter = link.jitter ? ` ± ${seconds(link.jitter.value)}` : "";
  put(at("rtt"), reading(link.rtt, (value) => seconds(value) + jitter));
  put(at("up"), reading(link.goodput_up, rate));
  put(at("down"), reading(link.goodput_down, rate));
  optional("retransmitted", link.retransmitted?.value, percent);
  optional("signal", link.signal?.value, (dbm) => `${dbm.toFixed(0)} dBm`);
}

/** Set the lamp in the header; announce a new state to screen readers, once. */
function pill(state, text) {
  const { dataset } = at("pill");
  if (dataset.state !== state) put(at("announce"), text);
  dataset.state = state;
  put(at("pill-text"), text);
}

function buildStages() {
  for (const stage of STAGES) {
    const part = document.createElement("span");
    part.dataset.stage = stage;
    at("stages-bar").append(part);
    const row = document.createElement("div");
    const name = document.createElement("dt");
    name.dataset.stage = stage;
    name.textContent = stage;
    const value = document.createElement("dd");
    value.id = `stage-${stage}`;
    value.textContent = "–";
    row.append(name, value);
    at("stages").append(row);
  }
}

function showStages(rounds) {
  const times = STAGES.map((stage) => rounds?.stages_s[stage] ?? 0);
  const total = times.reduce((sum, time) => sum + time, 0);
  put(at("round-time"), total ? seconds(total) : "–");
  put(at("round-count"), rounds ? `median of the last ${rounds.count}` : "");
  STAGES.forEach((stage, i) => {
    at("stages-bar").children[i].style.flexGrow = total ? times[i] / total : 0;
    put(at(`stage-${stage}`), times[i] ? seconds(times[i]) : "–");
  });
}

/** Show a row if its value is known, else hide it. */
function optional(id, value, format) {
  const known = value !== null && value !== undefined;
  at(id).parentElement.hidden = !known;
  if (known) put(at(id), format(value));
}

/** Set an element's text if it changes: the same text is not announced or painted again. */
function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Format a measured value, with its age if that exceeds RECENT_S. */
function reading(measured, format) {
  if (!measured) return "–";
  const age = measured.age_s > RECENT_S ? `, ${span(measured.age_s)} ago` : "";
  return format(measured.value) + age;
}

function percent(share) {
  return share === null ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}\u00a0%`;
}

function seconds(value) {
  if (value < 0.000_995) return `${(1e6 * value).toFixed(0)}\u00a0µs`;
  if (value < 0.9995) return `${(1e3 * value).toFixed(value < 0.00995 ? 1 : 0)}\u00a0ms`;
  return `${value.toFixed(1)}\u00a0s`;
}

function span(value) {
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

function rate(bps) {
  if (bps < 1e6) return `${(bps / 1e3).toFixed(0)}\u00a0kbit/s`;
  if (bps < 1e9) return `${(bps / 1e6).toFixed(bps < 1e7 ? 1 : 0)}\u00a0Mbit/s`;
  return `${(bps / 1e9).toFixed(1)}\u00a0Gbit/s`;
}
