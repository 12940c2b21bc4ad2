// Runs one client's calls, as run.py does for those in Python: node run.mjs OPTIONS
//
// The program's export `calls` has a function for each name; its only argument has `url`,
// `base_url`, `model` and `tokenizer`. What it throws is its result.

import { appendFileSync, readFileSync } from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const MOST_CHARS = 400; // of an error that is shown
const options = JSON.parse(process.argv[2]);
const { url, model, tokenizer } = options;

const report = (found) => appendFileSync(options.out, JSON.stringify(found) + "\n");

const expired = (ms) =>
  new Promise((_, reject) =>
    setTimeout(() => reject(new Error("the call did not end in time")), ms).unref(),
  );

async function errorOf(call) {
  try {
    const server = { url, base_url: url + "/v1", model, tokenizer };
    await Promise.race([call(server), expired(1000 * options.timeout_s)]);
  } catch (error) {
    console.error(error);
    const line = String(error?.message ?? error).trim().split("\n")[0];
    return `${error?.name ?? "Error"}: ${line}`.slice(0, MOST_CHARS);
  }
  return "";
}

const manifest = path.join(
  path.dirname(options.program), "node_modules", options.package, "package.json",
);
report({ version: JSON.parse(readFileSync(manifest)).version });
const { calls } = await import(pathToFileURL(options.program));
for (const [name, call] of Object.entries(calls)) {
  const needed = Object.entries(options.missing).find(([prefix]) => name.startsWith(prefix));
  if (needed) {
    report({ call: name, result: "skipped", detail: `the server has no ${needed[1]}` });
    continue;
  }
  report({ begun: name });
  const start = performance.now();
  const detail = await errorOf(call);
  const seconds = Math.round((performance.now() - start) / 10) / 100;
  report({ call: name, result: detail ? "failed" : "ok", detail, seconds });
}
process.exit(0); // a call that did not end must not keep the process
