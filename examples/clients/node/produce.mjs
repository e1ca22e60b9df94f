// Writes the numbers 1 to 30 to a topic. To run it: npm install kafkajs && node produce.mjs

import { Kafka, Partitioners } from "kafkajs";

const kafka = new Kafka({ brokers: ["localhost:9092"] });
const producer = kafka.producer({
  idempotent: true,
  createPartitioner: Partitioners.DefaultPartitioner,
});
await producer.connect();
await producer.send({
  topic: "greetings",
  messages: Array.from({ length: 30 }, (_, index) => ({
    key: `key-${index + 1}`,
    value: JSON.stringify({ number: index + 1 }),
    headers: { tenant: "c" },
  })),
});
await producer.disconnect();
