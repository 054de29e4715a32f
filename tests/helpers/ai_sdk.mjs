// The Vercel AI SDK's anthropic provider against the server at URL: node ai_sdk.mjs URL
import { createAnthropic } from "@ai-sdk/anthropic";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const provider = createAnthropic({ baseURL: `${process.argv[2]}/v1`, apiKey: "key" });
const base = { model: provider("tiny"), temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const get_weather = tool({
  description: "Get the weather of a city.",
  inputSchema: jsonSchema(schema),
  execute: ({ city }) => ({ city, weather: "sunny" }),
});
const TEXT = { ...base, prompt: "What is 2+2? Answer with just the number." };
const CALL = { ...base, prompt: "What is the weather in Tokyo?", tools: { get_weather } };

const answer = ({ text, reasoningText, finishReason, usage, toolCalls }) => ({
  text, reasoning: reasoningText, finish: finishReason, output: usage.outputTokens,
  calls: toolCalls.map(({ toolName, input }) => ({ toolName, input })),
});
const streamed = async (asked) => {
  const stream = streamText({ ...asked, onError: () => {} });
  await stream.consumeStream();
  const names = ["text", "reasoningText", "finishReason", "usage", "toolCalls"];
  const values = await Promise.all(names.map((name) => stream[name]));
  return answer(Object.fromEntries(names.map((name, i) => [name, values[i]])));
};
const refused = async (asked) => {
  try {
    await generateText(asked);
  } catch (error) {
    return { status: error.statusCode, message: error.message };
  }
};

// The last line of the output is an object; the answers of a pair are the plain one, and the streamed one.
const agent = await generateText({ ...CALL, stopWhen: stepCountIs(2) });
console.log(JSON.stringify({
  text: [answer(await generateText(TEXT)), await streamed(TEXT)],
  call: [answer(await generateText(CALL)), await streamed(CALL)],
  agent: agent.steps.map(answer),
  refused: await refused({ ...TEXT, model: provider("nope") }),
}));
