// The notice that the edge is not available: since when, why, what mends it, and what answers do meanwhile.

import { showWithCode } from "./code.js";
import { duration, setText } from "./figures.js";

// By the service's setting `on_link_loss`.
const MEANWHILE = {
  wait: "Answers wait for the edge; an answer that waits too long fails.",
  local: "Meanwhile this device answers alone. Its tokens have a dashed underline: no target verified them.",
  fail: "Answers fail until the edge is back.",
};
let shown = ""; // the message and remedy that the notice has

const element = (id) => document.getElementById(id);

/**
 * Show the notice, or hide it while the edge is there. link: from the service's status; null if the
 * service does not answer. policy: the service's setting.
 */
export function showOutage(link, policy) {
  const isAway = link?.up === false;
  element("outage").hidden = !isAway;
  if (!isAway) {
    shown = "";
    return;
  }
  setText(element("outage-title"), `The edge is not available: ${link.state}`);
  setText(element("outage-since"), since(link));
  setText(element("outage-meanwhile"), MEANWHILE[policy] ?? "");
  if (shown === link.message + link.remedy) return; // a selection in the text stays
  shown = link.message + link.remedy;
  showWithCode(element("link-problem"), link.message);
  element("link-remedy").hidden = !link.remedy;
  showWithCode(element("link-remedy"), link.remedy ? `To mend it: ${link.remedy}.` : "");
}

function since({ away_s: away }) {
  if (away === null) return "Not connected since the service began.";
  const when = new Date(Date.now() - 1000 * away).toLocaleTimeString();
  return `Away since ${when}, for ${duration(away)}.`;
}
