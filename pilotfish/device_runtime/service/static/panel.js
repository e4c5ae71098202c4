// The panel: requests the status each second and shows it, or that the service does not answer.

import { showWithCode } from "./code.js";
import { duration, percent, rate, seconds, setText } from "./figures.js";
import { offerProtocols } from "./options.js";
import { showOutage } from "./outage.js";
import { drawLine, roundUp } from "./pictures.js";
import { request } from "./service.js";

const PAUSE = 1000; // ms between two requests
// ms: longest pause while the service does not answer, and the pause of a hidden page
const LONGEST_PAUSE = 8000;
const TIMEOUT = 5000; // ms
const RECENT_S = 10; // s: the panel shows the age of older readings
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
  showOutage(null);
  setLamp("gone", "no service");
}

/** Format the accepted share of each source's hints: "device 93 %, text 40 %"; null without hints. */
function hintShares(hints) {
  const shares = Object.entries(hints ?? {}).map(
    ([source, { drafted, accepted }]) => `${source}\u00a0${percent(accepted / drafted)}`,
  );
  return shares.join(", ") || null;
}

function showStatus(status) {
  const { link, acceptance, rounds, lanes, energy } = status;
  showLink(link, status.edge);
  showOutage(link, status.on_link_loss);
  showMisfits(status.misfits);
  offerProtocols(status.protocols);
  setText(element("acceptance"), percent(acceptance.recent));
  element("acceptance-meter").value = acceptance.recent ?? 0;
  setText(element("acceptance-total"), percent(acceptance.total));
  showOptional("hints", hintShares(status.hints), (shares) => shares);
  showOptional("forgiven", status.forgiven || null, (count) => `${count} drafted tokens`);
  showOptional("deviation", status.deviation || null, (mean) => `${percent(mean)} a position`);
  setText(element("round-tokens"), rounds ? rounds.tokens.toFixed(2) : "–");
  setText(element("speed"), speed(status));
  showProtocol(status);
  showStages(rounds);
  showHistory(status.history);
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

/** Show what the service found at its start: an idle GPU, too little memory. */
function showMisfits(misfits) {
  element("misfits").hidden = !misfits.length;
  const list = element("misfit-list");
  if (list.children.length === misfits.length) return; // they do not change while a service runs
  list.replaceChildren(
    ...misfits.map(({ message }) => {
      const row = document.createElement("li");
      showWithCode(row, message);
      return row;
    }),
  );
}

/** Format the speed now, or that of the last answer while none runs. */
function speed({ tokens_per_s: now, last, lanes }) {
  if (now !== null) return `${now.toFixed(1)} tokens/s now`;
  return last && !lanes.running ? `${last.tokens_per_s.toFixed(1)} tokens/s, last answer` : "–";
}

/** Show the protocol of the running answer's rounds; else the last answer's, and why it was taken. */
function showProtocol({ rounds, protocol: last, protocols, lanes }) {
  const current = lanes.running && rounds ? { name: rounds.protocol, window: rounds.window } : last;
  const hasWindow = protocols.some(({ name, window }) => window && name === current?.name);
  const window = current?.window && hasWindow ? `, window ${current.window}` : "";
  setText(element("protocol"), current ? current.name + window : "–");
  setText(element("reason"), (current === last && last?.reason) || "");
}

function showHistory({ step_s: step, acceptance, rtt_s: rtts, away }) {
  const span = duration(step * away.length).replace(" 0 s", "");
  const shared = { away, span };
  const acceptancePicture = { ...shared, values: acceptance, top: 1, format: percent };
  drawLine(element("acceptance-picture"), acceptancePicture);
  const top = roundUp(Math.max(...rtts, 0), 0.001);
  drawLine(element("rtt-picture"), { ...shared, values: rtts, top, format: seconds });
}

function showLink(link, edge) {
  if (link.up === null || !edge) {
    setLamp("unknown", edge ? "link unknown" : "no edge");
    setText(element("link-state"), edge ? "unknown" : "no edge: the drafter answers alone");
  } else {
    const since = `${link.state} for ${duration(link.away_s ?? link.since_s)}`;
    setLamp(link.up ? "up" : "down", `link ${since}`);
    setText(element("link-state"), since);
  }
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

/** Format a measured value, with its age if the age exceeds RECENT_S. */
function formatReading(measured, format) {
  if (!measured) return "–";
  const age = measured.age_s > RECENT_S ? `, ${duration(measured.age_s)} ago` : "";
  return format(measured.value) + age;
}
