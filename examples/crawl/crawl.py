#!/usr/bin/env python3
"""The crawl in Python: jobs from one topic, results to another, and every wait in the scheduler.

    pip install confluent-kafka
    python crawl.py localhost:9092 http://127.0.0.1:8101/...

The pages that are named are scheduled first; without any it goes on with what is scheduled.

What it lacks beside the worker in Rust. It is at-least-once: the result, the jobs it leads to and the place in the
topic are not written together, so when it is killed between them it crawls that page again and writes its result
twice (the jobs are still one each, because the scheduler knows their keys). It asks for one page at a time, over all
hosts, so a slow host holds up the others; it reads no robots.txt and no Retry-After; and a regular expression is no
reader of HTML. Use either this or the worker for a site: they describe a job differently, and the scheduler refuses
a second description of the same page as a conflict.
"""
import json, os, re, sys, time
from urllib.parse import urljoin, urlsplit
from urllib.request import urlopen

from confluent_kafka import Consumer, Producer

TOPICS = "crawl-jobs crawl-results crawl-jobs-dlq scheduler.jobs.ingest"
jobs, results, dead, ingest = os.environ.get("TOPICS", TOPICS).split()
brokers, *pages = sys.argv[1:]
kafka = {"bootstrap.servers": brokers}
consumer = Consumer(kafka | {"group.id": f"{jobs}-py", "auto.offset.reset": "earliest", "enable.auto.commit": False})
producer = Producer(kafka | {"enable.idempotence": True, "partitioner": "murmur2_random"})


def schedule(url, attempt=0):
    """The key makes a page one job however often it is linked. Another attempt has a key of its own."""
    job = {"appName": "crawl", "delay": f"{2 ** attempt - 1}s", "idempotencyKey": f"{url} {attempt}",
           "key": urlsplit(url).netloc, "jobData": {"url": url, "attempt": attempt}}
    producer.produce(ingest, json.dumps(job))


for page in pages:
    schedule(page)
producer.flush()
consumer.subscribe([jobs])
while record := consumer.poll():
    if record.error():
        sys.exit(str(record.error()))
    job = json.loads(record.value())
    url, attempt = job["url"], job.get("attempt", 0)
    try:
        with urlopen(url, timeout=2) as page:
            links = {urljoin(url, link) for link in re.findall('href="([^"#]+)', page.read().decode())}
        producer.produce(results, json.dumps({"url": url, "status": page.status, "links": sorted(links)}), url)
        for link in links:
            if urlsplit(link).hostname == urlsplit(url).hostname:
                schedule(link)
    except OSError as error:  # of urllib, of a timeout, of a broken connection
        if getattr(error, "code", 0) in (404, 410) or attempt == 3:
            producer.produce(dead, record.value(), record.key(), headers={"error-message": str(error)})
        else:
            schedule(url, attempt + 1)
    producer.flush()
    consumer.commit(record)
    time.sleep(0.5)
