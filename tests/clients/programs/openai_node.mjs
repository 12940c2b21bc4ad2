// openai-node.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = ({ base_url }) => new OpenAI({ baseURL: base_url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const Forecast = z.object({ city: z.enum(["Oslo", "Paris"]), days: z.int().min(1).max(9) });
const weather = {
  type: "function",
  function: {
    name: "weather",
    description: "The weather of a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Oslo", "Paris"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

async function collected(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

export const calls = {
  "models.list": async (server) => {
    assert.equal((await client(server).models.list()).data[0].id, server.model);
  },

  "chat.completions.create": async (server) => {
    const answer = await client(server).chat.completions.create({
      model: server.model, messages, max_tokens: 16,
    });
    assert(answer.choices[0].message.content);
    assert(answer.usage.completion_tokens <= 16);
  },

  "chat.completions.create, streamed": async (server) => {
    const stream = await client(server).chat.completions.create({
      model: server.model, messages, max_tokens: 16, stream: true,
      stream_options: { include_usage: true },
    });
    const chunks = await collected(stream);
    assert(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""));
    assert(chunks.at(-1).usage.completion_tokens <= 16);
  },

  "chat.completions.stream": async (server) => {
    const stream = client(server).chat.completions.stream({
      model: server.model, messages, max_tokens: 16,
    });
    assert(await stream.finalContent());
    assert((await stream.finalChatCompletion()).choices[0].finish_reason);
  },

  "chat.completions.parse, a zod object; the conversation goes on": async (server) => {
    const openai = client(server);
    const answer = await openai.chat.completions.parse({
      model: server.model, messages, response_format: zodResponseFormat(Forecast, "forecast"),
    });
    const { message } = answer.choices[0];
    Forecast.parse(message.parsed);
    const following = await openai.chat.completions.create({
      model: server.model, messages: [...messages, message, ...messages], max_tokens: 16,
    });
    assert(following.choices.length);
  },

  "chat.completions.create, tools": async (server) => {
    const answer = await client(server).chat.completions.create({
      model: server.model, messages, tools: [weather], tool_choice: "required",
    });
    const [choice] = answer.choices;
    assert.equal(choice.finish_reason, "tool_calls");
    assert(JSON.parse(choice.message.tool_calls[0].function.arguments).city);
  },

  "chat.completions.stream, tools": async (server) => {
    const names = [];
    const stream = client(server).chat.completions.stream({
      model: server.model, messages, tools: [weather], tool_choice: "required",
      parallel_tool_calls: false,
    });
    stream.on("tool_calls.function.arguments.done", (call) => names.push(call.name));
    const final = await stream.finalChatCompletion();
    assert.deepEqual(names, ["weather"]);
    assert(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments).city);
  },

  "chat.completions.runTools": async (server) => {
    const cities = [];
    const runner = client(server).chat.completions.runTools({
      model: server.model, messages, max_tokens: 200,
      tool_choice: { type: "function", function: { name: "weather" } },
      tools: [
        {
          type: "function",
          function: {
            ...weather.function,
            parse: JSON.parse,
            function: ({ city }) => (cities.push(city), `It rains in ${city}.`),
          },
        },
      ],
    });
    await runner.done();
    assert.equal(cities.length, 1);
  },

  "completions.create": async (server) => {
    const openai = client(server);
    const body = { model: server.model, prompt: "One", max_tokens: 8 };
    assert((await openai.completions.create(body)).choices[0].text);
    assert((await collected(await openai.completions.create({ ...body, stream: true }))).length);
  },

  "errors: BadRequestError": async (server) => {
    const asked = client(server).chat.completions.create({
      model: server.model, messages, temperature: 9,
    });
    await assert.rejects(asked, (error) => error.status === 400 && error.param === "temperature");
  },

  "responses.create": async (server) => {
    const answer = await client(server).responses.create({
      model: server.model, input: "Hello", max_output_tokens: 16,
    });
    assert(answer.output_text);
  },

  "responses.create, streamed": async (server) => {
    const stream = await client(server).responses.create({
      model: server.model, input: "Hello", max_output_tokens: 16, stream: true,
    });
    const kinds = (await collected(stream)).map((event) => event.type);
    assert.equal(kinds[0], "response.created");
    assert(kinds.includes("response.output_text.delta"));
  },

  "responses.stream": async (server) => {
    const stream = client(server).responses.stream({
      model: server.model, input: "Hello", max_output_tokens: 16,
    });
    assert((await stream.finalResponse()).output_text);
  },
};
