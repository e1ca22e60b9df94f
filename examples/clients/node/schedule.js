// Schedules a job by writing plain JSON to the ingest topic, without a library of Redeliver.

const { Kafka, Partitioners } = require("kafkajs");

const [brokers, topic, app] = process.argv.slice(2);
const request = { appName: app, delay: "2s", idempotencyKey: "node-1", jobData: { number: 33 } };
const kafka = new Kafka({ brokers: brokers.split(",") });
const producer = kafka.producer({ createPartitioner: Partitioners.DefaultPartitioner });
producer
  .connect()
  .then(() => producer.send({ topic, messages: [{ value: JSON.stringify(request) }] }))
  .then(([written]) => console.log(`written to ${topic}/${written.partition}/${written.baseOffset}`))
  .then(() => producer.disconnect());
