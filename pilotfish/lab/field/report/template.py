"""The text of the report's page: a Jinja template for `lab.page`.

`field.report.report_page` fills it in.
"""

TEMPLATE = """\
{% extends "page" %}
{% from "parts" import table, pictures %}
{% macro show(shown) %}
{% if shown.pictures %}
{{ pictures(shown.pictures) }}
{% endif %}
{% for words in shown.few %}
<p class="soft">{{ words }}</p>
{% endfor %}
{% endmacro %}
{% block title %}
Pilotfish field report: {{ runs | map(attribute="name") | join(", ") }}
{% endblock %}
{% block heading %}Pilotfish field report{% endblock %}
{% block origin %}
{{ runs | length }} run{{ "s" if runs | length > 1 }},
made {{ made }} by {{ software }}
{% endblock %}
{% block content %}

<dl>
{% for run in runs %}
<dt>{{ run.name }}</dt>
<dd>{{ summaries[run.name] }}</dd>
{% endfor %}
</dl>

<h2>What was measured</h2>
{% if differences.rows %}
<div class="facts">{{ table(differences) }}</div>
{% endif %}
<div class="facts">{{ table(common) }}</div>

<h2>The link over time</h2>
{% if gallery.rtt or gallery.link %}
<p>Times are UTC, by the device's clock; its time zone is not known. A point of a line is the median
of a round of a watch. If there are more rounds than a line has points, and in other runs, it is the
median of a part of the time; all parts are equally long. The band reaches from the smallest to the
largest value. Orange: the edge was away. Grey: nothing was measured, for example because the watch
was off. Lines break at both.</p>
{% endif %}
{% for run in runs if clock[run.name] %}
<p>{{ run.name }}: {{ clock[run.name] }}</p>
{% endfor %}
{{ show(gallery.rtt) }}
{% for run in runs if away[run.name] %}
<h3>{{ run.name }}: outages</h3>
<p>{{ away[run.name] }}</p>
{% if run.history.outages %}
<div class="reasons">{{ table(outages[run.name]) }}</div>
{% endif %}
{% endfor %}
{% if rtts.rows %}
<h3>Percentiles of the RTT</h3>
<p>Pings are small messages that a probe sends. Samples of rounds of answers were measured while
answers ran. A percentile is shown if at least one sample is expected above it: p90 needs 10
samples, p99 needs 100, and p99.9 needs 1,000. The picture leaves out the slowest 0.5 % of the line
that reaches farthest.</p>
{{ table(rtts) }}
{{ show(gallery.rtt_distribution) }}
{% endif %}
{% if gallery.link %}
<h3>Goodput, jitter, retransmissions, signal</h3>
<p>Goodput is the rate of a probe's transfer; a run without such transfers has the device's
estimates. The sign ≥ (in pictures a hollow triangle) marks a lower bound: the link carries at least
this much, and the transfer could not show whether it carries more. Jitter and retransmitted
segments are the device's estimates when an answer or probe began.</p>
{{ show(gallery.link) }}
{% endif %}
{% for run in runs if run.history.unmeasured %}
<p class="soft">{{ run.name }}: not measured: {{ run.history.unmeasured | join(", ") }}.</p>
{% endfor %}
<h3>Bytes</h3>
<p>Bytes of the messages as they are given to ZeroMQ, so without the overhead of encryption and TCP.
Probes are all messages that measure the link, also those just before an answer.</p>
{{ table(traffic) }}

{% if measured %}
<h2>Time per token and per round, bytes, energy</h2>
<p>The first round of an answer reads the prompt, so its time counts only as that of the first
token. Times per token and per round are those of the later rounds, the <em>steady</em> ones. Under
stream, each token counts as a round. Bytes are those of the messages of all rounds. A fixed choice
is any protocol but auto; the one with the lowest median is marked. Protocols whose text may differ
from the target's, such as local and wisv, are never marked.</p>
{% for run in runs if run.figures %}
<h3>{{ run.name }}</h3>
{{ table(latencies[run.name]) }}
{% endfor %}

{{ show(gallery.compared) }}

<h2>Distributions over answers</h2>
<p>A line tells which share of the answers had at most this value. Each protocol has a line for its
window with the lowest median time per token; the table has all windows. The pictures leave out the
largest 0.5 % of the line that reaches farthest.</p>
{{ show(gallery.distribution_compared) }}
{{ show(gallery.distribution) }}
{{ table(answer_percentiles) }}
{% endif %}

{% if gallery.latency %}
<h2>Latency against window</h2>
<p>Medians over answers, with 95 % intervals. A protocol with a single point has a dotted line
across, to compare the others with.</p>
{{ show(gallery.latency) }}
{% endif %}

{% if gallery.stages %}
<h2>Where the time goes</h2>
<p>Mean times over the steady rounds; means, unlike medians, add up. Queue is the time that a round
spends at the edge outside of the target's pass. How the time on the link divides into uplink and
downlink depends on the edge's clock; their sum does not. Under stream, the wait for a token divides
into the target's pass and the rest.</p>
{{ show(gallery.stages) }}
{% endif %}

{% if gallery.depths %}
<h2>Acceptance by position</h2>
<p>The depth of a drafted token is its place in the window, from 1. A round reaches a depth if all
drafted tokens before it were accepted. A depth counts the rounds that drafted it, under all windows
of a protocol together. Vertical lines are 95 % intervals.</p>
{{ show(gallery.depths) }}
{% for run in runs if positions[run.name].rows %}
<details><summary>{{ run.name }}: the counts</summary>
{{ table(positions[run.name]) }}
</details>
{% endfor %}
{% endif %}

{% if gallery.bytes_per_token %}
<h2>Bytes per token</h2>
<p>Bytes of the messages of all rounds, without handshake, prompt and probes, and without the
overhead of encryption and TCP.</p>
{{ show(gallery.bytes_per_token) }}
{% endif %}

<h2>The choices of auto, and the cost of the alternatives</h2>
{% if auto %}
<p>Before each answer, auto predicts the time per token of every choice. The forecast is the median
of these predictions. A fixed choice is a protocol and window that the run itself requested, without
auto.</p>
{{ show(gallery.choices) }}
{{ show(gallery.alternatives) }}
{{ show(gallery.predictions) }}
{% for run in runs if run.name in auto %}
<h3>{{ run.name }}{% if run.hindsight.policies %}, policy {{ run.hindsight.policies | join(", ") }}
{% endif %}</h3>
<p>{{ auto[run.name] }}</p>
<div class="reasons">{{ table(choices[run.name]) }}</div>
{% endfor %}
{% else %}
<p class="soft">Not measured: the run has no answer under protocol auto.</p>
{% endif %}

<h2>How the numbers are computed</h2>
<p>Warm-up answers and unfinished ones are left out; the first table has their numbers. A median's
95 % interval is a percentile bootstrap over answers, with {{ "{:,}".format(resamples) }} resamples
and a fixed seed. It tells where the median would be with other prompts of this kind over this link.
Each line, bar, median, mean and share in the pictures rests on {{ few }} answers, rounds or samples
at least; a line over time as a whole, and a point of it may be the median of fewer. p95 is the 95th
percentile over answers, or over rounds for a round's time. Intervals of shares are Wilson's. α is
the share of verified positions that were accepted. n counts answers unless another unit is named.
</p>
{% endblock %}
"""
