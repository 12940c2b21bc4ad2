// The Vercel AI SDK, with @ai-sdk/openai-compatible.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenAI } from "@ai-sdk/openai";
import * as ai from "ai";
import { z } from "zod";

const prompt = "What is the weather in Oslo?";
const Forecast = z.object({ city: z.enum(["Oslo", "Paris"]), days: z.number().int().min(1).max(9) });
const thought = "<think>[a-z ]{5,20}</think>[A-Z][a-z ]{5,20}";

const model = (server, more = {}) =>
  createOpenAICompatible({
    name: "pagestream", baseURL: server.base_url, apiKey: "none",
    supportsStructuredOutputs: true, includeUsage: true, ...more,
  })(server.model);

const weather = (cities) =>
  ai.tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.enum(["Oslo", "Paris"]) }),
    execute: async ({ city }) => (cities.push(city), `It rains in ${city}.`),
  });

const options = (server) => ({ model: model(server), prompt, maxRetries: 0, maxOutputTokens: 200 });

const responses = (server) => ({
  ...options(server),
  model: createOpenAI({ baseURL: server.base_url, apiKey: "none" }).responses(server.model),
});

export const calls = {
  generateText: async (server) => {
    const { text, usage } = await ai.generateText({ ...options(server), maxOutputTokens: 16 });
    assert(text);
    assert(usage.outputTokens <= 16);
  },

  streamText: async (server) => {
    const result = ai.streamText({ ...options(server), maxOutputTokens: 16 });
    let text = "";
    for await (const part of result.textStream) text += part;
    assert(text);
    assert((await result.usage).outputTokens <= 16);
  },

  generateObject: async (server) => {
    const { object } = await ai.generateObject({ ...options(server), schema: Forecast });
    Forecast.parse(object);
  },

  streamObject: async (server) => {
    const result = ai.streamObject({ ...options(server), schema: Forecast });
    const parts = [];
    for await (const part of result.partialObjectStream) parts.push(part);
    assert(parts.length);
    Forecast.parse(await result.object);
  },

  "generateText, Output.object": async (server) => {
    const result = await ai.generateText({
      ...options(server), output: ai.Output.object({ schema: Forecast }),
    });
    Forecast.parse(result.output);
  },

  "generateText, tools and the result of one": async (server) => {
    const cities = [];
    const { steps } = await ai.generateText({
      ...options(server), tools: { weather: weather(cities) }, stopWhen: ai.stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    });
    assert(cities.length);
    assert.equal(steps.length, 2);
    assert.equal(steps[0].finishReason, "tool-calls");
  },

  "streamText, tools": async (server) => {
    const cities = [];
    const result = ai.streamText({
      ...options(server), tools: { weather: weather(cities) },
      toolChoice: { type: "tool", toolName: "weather" },
    });
    const kinds = [];
    for await (const part of result.fullStream) kinds.push(part.type);
    for (const kind of ["tool-input-delta", "tool-call", "tool-result"])
      assert(kinds.includes(kind), `${kind} is not in ${kinds}`);
    assert.equal(cities.length, 1);
  },

  "streamText, reasoning": async (server) => {
    const result = ai.streamText({
      ...options(server), providerOptions: { pagestream: { guided_regex: thought } },
    });
    const kinds = [];
    for await (const part of result.fullStream) kinds.push(part.type);
    assert(kinds.includes("reasoning-delta"), String(kinds));
    assert(await result.text);
  },

  "generateText, tools and Output.object": async (server) => {
    const result = await ai.generateText({
      ...options(server), tools: { weather: weather([]) }, stopWhen: ai.stepCountIs(40),
      output: ai.Output.object({ schema: Forecast }),
    });
    Forecast.parse(result.output);
  },

  "responses.create by @ai-sdk/openai, generateText": async (server) => {
    const { text } = await ai.generateText({ ...responses(server), maxOutputTokens: 16 });
    assert(text);
  },

  "responses.create by @ai-sdk/openai, streamText": async (server) => {
    const result = ai.streamText({ ...responses(server), maxOutputTokens: 16 });
    assert(await result.text);
    assert((await result.usage).outputTokens <= 16);
  },

  "responses.create by @ai-sdk/openai, Output.object": async (server) => {
    const result = await ai.generateText({
      ...responses(server), output: ai.Output.object({ schema: Forecast }),
    });
    Forecast.parse(result.output);
  },

  "responses.create by @ai-sdk/openai, tools and the result of one": async (server) => {
    const cities = [];
    const { steps } = await ai.generateText({
      ...responses(server), tools: { weather: weather(cities) }, stopWhen: ai.stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    });
    assert(cities.length);
    assert.equal(steps.length, 2);
  },

  "errors: APICallError": async (server) => {
    await assert.rejects(
      ai.generateText({ ...options(server), temperature: 9 }),
      (error) => error.statusCode === 400,
    );
  },
};
