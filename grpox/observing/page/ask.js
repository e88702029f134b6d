// The page's only source of data: the server that served it, or the answers frozen into the page.

const FROZEN = byId("frozen") ? JSON.parse(byId("frozen").textContent) : null;
const TOKEN = FROZEN ? "" : tokenOf();

/** The token of the page's address, kept for a reload; the address bar then shows it no longer. */
function tokenOf() {
  const address = new URL(location.href);
  const token = address.searchParams.get("token");
  if (token === null) return sessionStorage.getItem("token") || "";
  sessionStorage.setItem("token", token);
  address.searchParams.delete("token");
  history.replaceState(null, "", address);
  return token;
}

class Refused extends Error {}

/** Ask for an answer by name; reject with Refused where the server says why not, else with what fetch says. */
async function ask(name, parameters = {}) {
  if (FROZEN) return frozenAnswer(name, parameters);
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters))
    for (const each of Array.isArray(value) ? value : [value])
      if (each !== null && each !== undefined && each !== "") query.append(key, each);
  const answer = await fetch(`/api/${name}?${query}`, { headers: { Authorization: `Bearer ${TOKEN}` }, cache: "no-store" });
  if (answer.ok) return answer.json();
  const told = await answer.json().catch(() => ({}));
  throw new Refused(told.error || `${name}: ${answer.status} ${answer.statusText}`);
}

function frozenAnswer(name, parameters) {
  if (name === "runs") return FROZEN.runs;
  const answers = FROZEN.answers[name];
  if (answers === undefined) throw new Refused(`this page holds no ${name}`);
  if (name === "compare") return answers;
  const answer = answers[parameters.run];
  if (name === "completions") return frozenCompletions(answer, parameters);
  if (name === "tokens") return { tokens: thawedTokens(answer[parameters.id]) };
  if (name === "phases") return frozenPhases(answer, parameters.step);
  return answer;
}

/** Tokens from their columns; a column that never changes is one value. */
function thawedTokens(frozen) {
  if (!frozen) return [];
  const columns = Object.entries(frozen.columns);
  return Array.from({ length: frozen.count }, (_, place) =>
    Object.fromEntries(columns.map(([name, values]) => [name, Array.isArray(values) ? values[place] : values])));
}

function frozenCompletions(answer, wanted) {
  const low = (wanted.text || "").toLowerCase();
  const within = (value, least, most) =>
    (least === null || least === undefined || value >= least) && (most === null || most === undefined || value <= most);
  const hasReward = wanted.reward_min !== null && wanted.reward_min !== undefined ||
    wanted.reward_max !== null && wanted.reward_max !== undefined;
  let rows = answer.rows.filter((row) =>
    (!low || [row.prompt, row.completion, ...row.messages.map(([, text]) => text)].join("\n").toLowerCase().includes(low)) &&
    (!hasReward || row.reward !== null && within(row.reward, wanted.reward_min, wanted.reward_max)) &&
    within(row.step, wanted.step_min, wanted.step_max) &&
    (!wanted.prompt || row.prompt_id === wanted.prompt));
  const by = { step: (row) => row.step, "-step": (row) => -row.step, reward: (row) => -(row.reward ?? -Infinity), "-reward": (row) => row.reward ?? Infinity }[wanted.order];
  if (by) rows = [...rows].sort((a, b) => (by(a) === by(b) ? 0 : by(a) - by(b)));
  const history = [rows.map((row) => row.step), rows.map((row) => row.reward)];
  if (wanted.group_by_prompt) rows = groupedByPrompt(rows);
  const offset = wanted.offset || 0;
  return { ...answer, total: rows.length, history, rows: rows.slice(offset, offset + (wanted.limit ?? 50)) };
}

function groupedByPrompt(rows) {
  const groups = new Map();
  for (const row of rows) groups.set(row.prompt_id, [...(groups.get(row.prompt_id) || []), row]);
  return [...groups].map(([prompt_id, members]) => {
    const steps = members.map((row) => row.step);
    const [first_step, last_step] = [Math.min(...steps), Math.max(...steps)];
    const meanAt = (step) => {
      const rewards = members.filter((row) => row.step === step && row.reward !== null).map((row) => row.reward);
      return rewards.length ? rewards.reduce((sum, each) => sum + each, 0) / rewards.length : null;
    };
    const { prompt, data } = members[0];
    return { prompt_id, prompt, data, count: members.length, first_step, last_step,
      reward_first: meanAt(first_step), reward_last: meanAt(last_step) };
  });
}

function frozenPhases(answer, step) {
  if (step === null || step === undefined) return answer;
  const phases = Object.entries(answer.history).map(([name, [steps, seconds]]) => {
    const place = steps.indexOf(step);
    return [name, place < 0 ? null : seconds[place]];
  });
  return { ...answer, step, phases: phases.filter(([, seconds]) => seconds !== null) };
}
