// Schedules a job by a plain JSON record on the ingest topic: no client library of Redeliver's is needed.

const { Kafka, Partitioners } = require("kafkajs");

async function main([brokers, topic, app]) {
  const request = { appName: app, delay: "2s", idempotencyKey: "node-1", jobData: { text: "hello from Node" } };
  const kafka = new Kafka({ brokers: brokers.split(",") });
  const producer = kafka.producer({ createPartitioner: Partitioners.DefaultPartitioner });
  await producer.connect();
  const [written] = await producer.send({ topic, acks: -1, messages: [{ value: JSON.stringify(request) }] });
  await producer.disconnect();
  console.log(`written to ${topic}/${written.partition}/${written.baseOffset}`);
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error.message);
  process.exit(1);
});
