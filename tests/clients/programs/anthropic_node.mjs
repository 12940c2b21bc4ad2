// @anthropic-ai/sdk.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = ({ url }) => new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const thinking = { type: "enabled", budget_tokens: 1024 };
const weather = {
  name: "weather",
  description: "The weather of a city.",
  input_schema: {
    type: "object",
    properties: { city: { type: "string", enum: ["Oslo", "Paris"] } },
    required: ["city"],
    additionalProperties: false,
  },
};

export const calls = {
  "messages.create": async (server) => {
    const answer = await client(server).messages.create({
      model: server.model, max_tokens: 16, system: "Be brief.", messages,
    });
    assert.equal(answer.content[0].type, "text");
    assert(answer.usage.output_tokens <= 16);
    assert(answer._request_id);
  },

  "messages.create, streamed": async (server) => {
    const kinds = [];
    const stream = await client(server).messages.create({
      model: server.model, max_tokens: 16, messages, stream: true,
    });
    for await (const event of stream) kinds.push(event.type);
    assert.equal(kinds[0], "message_start");
    assert.equal(kinds.at(-1), "message_stop");
  },

  "messages.stream": async (server) => {
    const stream = client(server).messages.stream({ model: server.model, max_tokens: 16, messages });
    let text = "";
    stream.on("text", (delta) => { text += delta; });
    assert.equal(await stream.finalText(), text);
  },

  "messages.create, tools and the result of one": async (server) => {
    const asked = { model: server.model, max_tokens: 200, tools: [weather] };
    const answer = await client(server).messages.create({
      ...asked, messages, tool_choice: { type: "tool", name: "weather" },
    });
    assert.equal(answer.stop_reason, "tool_use");
    const call = answer.content.find((block) => block.type === "tool_use");
    assert(["Oslo", "Paris"].includes(call.input.city));
    const result = { type: "tool_result", tool_use_id: call.id, content: "It rains." };
    const next = await client(server).messages.create({
      ...asked,
      max_tokens: 16,
      messages: [
        ...messages,
        { role: "assistant", content: answer.content },
        { role: "user", content: [result] },
      ],
    });
    assert(next.content);
  },

  "messages.stream, tools": async (server) => {
    const stream = client(server).messages.stream({
      model: server.model, max_tokens: 200, messages, tools: [weather], tool_choice: { type: "any" },
    });
    let parts = 0;
    stream.on("inputJson", () => { parts += 1; });
    const final = await stream.finalMessage();
    assert(parts > 0);
    assert(final.content.some((block) => block.type === "tool_use"));
  },

  "messages.stream, thinking": async (server) => {
    const stream = client(server).messages.stream({
      model: server.model, max_tokens: 16, messages, thinking,
    });
    let thought = "";
    stream.on("thinking", (delta) => { thought += delta; });
    const [block] = (await stream.finalMessage()).content;
    assert.equal(block.type, "thinking");
    assert.equal(block.thinking, thought);
  },

  "messages.countTokens": async (server) => {
    const counted = await client(server).messages.countTokens({ model: server.model, messages });
    assert(counted.input_tokens > 0);
  },

  "errors: BadRequestError, NotFoundError": async (server) => {
    await assert.rejects(
      client(server).messages.create({ model: server.model, max_tokens: 0, messages }),
      Anthropic.BadRequestError,
    );
    await assert.rejects(
      client(server).messages.create({ model: "another", max_tokens: 1, messages }),
      Anthropic.NotFoundError,
    );
  },
};
