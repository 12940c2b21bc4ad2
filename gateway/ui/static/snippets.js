// The request of an answer as programs that send it again. API keys are named, never shown.

const origin = () => new URL(".", location.href).href.replace(/\/$/, "");
const shellQuoted = text => `'${text.replaceAll("'", `'\\''`)}'`;

export function asCurl(body, needsKey) {
  const key = needsKey ? ` \\\n  -H "Authorization: Bearer $PAGESTREAM_API_KEY"` : "";
  const data = JSON.stringify({ ...body, stream: true }, null, 2);
  return `curl -N ${shellQuoted(`${origin()}/v1/chat/completions`)} \\\n` +
    `  -H 'Content-Type: application/json'${key} \\\n  -d ${shellQuoted(data)}\n`;
}

// JSON's strings and numbers are Python's as well.
function literal(value, indent = "") {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  const deeper = `${indent}    `;
  if (Array.isArray(value))
    return `[\n${value.map(one => `${deeper}${literal(one, deeper)},\n`).join("")}${indent}]`;
  if (typeof value === "object") {
    const pairs = Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, deeper)}`);
    return `{${pairs.join(", ")}}`;
  }
  return JSON.stringify(value);
}

export function asPython(body, needsKey) {
  const key = needsKey ? `os.environ["PAGESTREAM_API_KEY"]` : `"unused"`;
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`);
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI\n\n` +
    `client = OpenAI(base_url=${JSON.stringify(`${origin()}/v1`)}, api_key=${key})\n` +
    `stream = client.chat.completions.create(\n${fields.join("")}    stream=True,\n)\n` +
    `for chunk in stream:\n    print(chunk.choices[0].delta.content or "", end="", flush=True)\n`;
}
