// The panel: requests the status each second and shows it, or that the service does not answer.

import { request } from "./service.js";

const PAUSE = 1000; // ms between two requests
// ms: longest pause while the service does not answer, and the pause of a hidden page
const LONGEST_PAUSE = 8000;
const TIMEOUT = 5000; // ms
const RECENT_S = 10; // the panel shows the age of older readings
const STAGES = ["draft", "encode", "uplink", "queue", "verify", "downlink", "settle"];

const element = (id) => document.getElementById(id);

/** Request the status for ever, less often while the page is hidden. */
export async function watchStatus() {
  buildStages();
  let pause = PAUSE;
  for (;;) {
    try {
      const response = await request("status", { timeout: TIMEOUT });
      if (!response.ok) throw new Error(`status ${response.status}`);
      showStatus(await response.json());
      element("unreachable").hidden = true;
      pause = PAUSE;
    } catch {
      pause = Math.min(2 * pause, LONGEST_PAUSE);
      showNoService(pause);
    }
    await wait(document.hidden ? LONGEST_PAUSE : pause);
  }
}

/** Wait `pause` ms, or until the page becomes visible or the network returns. */
function wait(pause) {
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

function showNoService(pause) {
  const banner = element("unreachable");
  setText(banner, `The service does not answer. The page tries again in ${Math.round(pause / 1000)} s.`);
  banner.hidden = false;
  setLamp("gone", "no service");
}

/** Format the accepted share of each source's hints: "device 93 %, text 40 %"; null without hints. */
function hintShares(hints) {
  const shares = Object.entries(hints ?? {}).map(
    ([source, { drafted, accepted }]) => `${source} ${percent(accepted / drafted)}`,
  );
  return shares.join(", ") || null;
}

function showStatus(status) {
  const { link, acceptance, rounds, protocol, lanes, energy } = status;
  showLink(link, status.edge);
  setText(element("acceptance"), percent(acceptance.recent));
  element("acceptance-meter").value = acceptance.recent ?? 0;
  setText(element("acceptance-total"), percent(acceptance.total));
  showOptional("hints", hintShares(status.hints), (shares) => shares);
  showOptional("forgiven", status.forgiven || null, (count) => `${count} drafted tokens`);
  showOptional("deviation", status.deviation || null, (mean) => `${percent(mean)} a position`);
  setText(element("round-tokens"), rounds ? rounds.tokens.toFixed(2) : "–");
  setText(element("speed"), status.last ? `${status.last.tokens_per_s.toFixed(1)} tokens/s` : "–");
  const window = protocol?.window ? `, window ${protocol.window}` : "";
  setText(element("protocol"), protocol ? protocol.name + window : "–");
  setText(element("reason"), protocol?.reason ?? "");
  showStages(rounds);
  const waiting = lanes.waiting ? `, ${lanes.waiting} waiting` : "";
  setText(element("lanes"), `${lanes.running} of ${lanes.total}${waiting}`);
  showOptional("power", energy?.watts, (watts) => `${watts.toFixed(1)} W`);
  const { count, recent } = status.recoveries;
  const last = recent.at(-1);
  const lastLoss = last ? `, last ${duration(last.ago_s)} ago for ${seconds(last.lost_s)}` : "";
  setText(element("recoveries"), count ? `${count} ×${lastLoss}` : "never");
  for (const name of ["edge", "target", "drafter", "software"]) {
    setText(element(name), status[name] ?? "–");
  }
}

function showLink(link, edge) {
  if (link.up === null || !edge) {
    setLamp("unknown", edge ? "link unknown" : "no edge");
    setText(element("link-state"), edge ? "unknown" : "no edge: the drafter answers alone");
  } else {
    const since = `${link.state} for ${duration(link.since_s)}`;
    setLamp(link.up ? "up" : "down", `link ${since}`);
    setText(element("link-state"), since);
  }
  showOptional("link-problem", link.up ? null : link.message, (message) =>
    link.remedy ? `${message} Remedy: ${link.remedy}.` : message,
  );
  const jitter = link.jitter ? ` ± ${seconds(link.jitter.value)}` : "";
  setText(element("rtt"), formatReading(link.rtt, (value) => seconds(value) + jitter));
  setText(element("up"), formatReading(link.goodput_up, rate));
  setText(element("down"), formatReading(link.goodput_down, rate));
  showOptional("retransmitted", link.retransmitted?.value, percent);
  showOptional("signal", link.signal?.value, (dbm) => `${dbm.toFixed(0)} dBm`);
}

/** Set the lamp in the header and its text; announce a new state to screen readers. */
function setLamp(state, text) {
  const { dataset } = element("pill");
  if (dataset.state !== state) setText(element("announce"), text);
  dataset.state = state;
  setText(element("pill-text"), text);
}

function buildStages() {
  for (const stage of STAGES) {
    const part = document.createElement("span");
    part.dataset.stage = stage;
    element("stages-bar").append(part);
    const row = document.createElement("div");
    const name = document.createElement("dt");
    name.dataset.stage = stage;
    name.textContent = stage;
    const value = document.createElement("dd");
    value.id = `stage-${stage}`;
    value.textContent = "–";
    row.append(name, value);
    element("stages").append(row);
  }
}

function showStages(rounds) {
  const times = STAGES.map((stage) => rounds?.stages_s[stage] ?? 0);
  const total = times.reduce((sum, time) => sum + time, 0);
  setText(element("round-time"), total ? seconds(total) : "–");
  setText(element("round-count"), rounds ? `median of the last ${rounds.count}` : "");
  STAGES.forEach((stage, i) => {
    element("stages-bar").children[i].style.flexGrow = total ? times[i] / total : 0;
    setText(element(`stage-${stage}`), times[i] ? seconds(times[i]) : "–");
  });
}

/** Show a row if its value is known, else hide the row. */
function showOptional(id, value, format) {
  const known = value !== null && value !== undefined;
  element(id).parentElement.hidden = !known;
  if (known) setText(element(id), format(value));
}

/** Set an element's text if it changes; the same text would be announced and painted again. */
function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Format a measured value, with its age if the age exceeds RECENT_S. */
function formatReading(measured, format) {
  if (!measured) return "–";
  const age = measured.age_s > RECENT_S ? `, ${duration(measured.age_s)} ago` : "";
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

/** Format a duration in whole seconds, minutes, hours or days. value: seconds. */
function duration(value) {
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
