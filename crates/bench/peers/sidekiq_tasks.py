"""What an operator does in Sidekiq Web: clicks, filled fields and seconds, as `operators_finish_twenty_tasks` takes them in the console.

    apt-get install ruby-sidekiq puma redis-server chromium chromium-driver
    python sidekiq_tasks.py

Debian 12 has Sidekiq 6.4.1, which cannot filter, without its scripts. A newer version takes precedence if it is installed as a gem, or if
RUBYLIB names `lib` of sidekiq (Ruby 3.1 runs 7.3.10), redis-client and connection_pool. There is no worker: a task ends when Sidekiq Web shows
what it has changed.
"""

import contextlib
import json
import re
import subprocess
import tempfile
import time
import urllib.request

# Dead jobs with the codes and tenants of the test, jobs that wait for a retry, and a scheduled one; and the pages.
APP = r"""
require "rack/session/cookie"
require "sidekiq"
require "sidekiq/web"
Sidekiq.configure_client { |config| config.redis = { url: ENV.fetch("REDIS_URL") } }
now = Time.now
job = lambda do |id, error, queue = "docs"|
  tenant = %w[acme globex][id[/\d+/].to_i % 2]
  values = { jid: id, class: "Call", queue: queue, args: [{ key: id, tenant: tenant, number: 1 }], created_at: now.to_f, enqueued_at: now.to_f }
  failed = { retry: true, retry_count: 5, error_class: error, error_message: "422 Unprocessable", failed_at: now.to_f, retried_at: now.to_f }
  values.merge(error ? failed : {}).transform_keys(&:to_s)
end
codes = %w[card.declined test.data test.more bad.amount slow.a slow.b].flat_map { |code| [code] * 4 } + ["http.422"]
codes.each_with_index do |code, index|
  Sidekiq::DeadSet.new.kill(Sidekiq.dump_json(job.("order-#{1_000_000 + index}", code)), notify_failure: false)
end
4.times { |index| Sidekiq::RetrySet.new.schedule(now + 600 * (index + 1), job.("order-#{index}", "http.503")) }
Sidekiq::RetrySet.new.schedule(now + 600, job.("mail-1", "http.503", "mail"))
Sidekiq::ScheduledSet.new.schedule(now + 3600, job.("reminder-7", nil))
use Rack::Session::Cookie, secret: "0" * 64, same_site: true
run Sidekiq::Web
"""


class Browser:
    def __init__(self, chromedriver):
        self.session = f"{chromedriver}/session"
        # So high that all rows fit: a bar covers the end of the window.
        arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--no-proxy-server", "--lang=en", "--window-size=1440,2000"]
        capabilities = {"browserName": "chrome", "goog:chromeOptions": {"args": arguments}, "timeouts": {"implicit": 10_000}}
        self.session += "/" + self.tell("", capabilities={"alwaysMatch": capabilities})["sessionId"]
        self.clicks = self.fields = 0

    def tell(self, command, **parameters):
        request = urllib.request.Request(self.session + command, json.dumps(parameters).encode(), {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))["value"]

    def find(self, xpath):
        """The first element, once there is one."""
        return next(iter(self.tell("/element", using="xpath", value=xpath).values()))

    def click(self, xpath):
        self.tell(f"/element/{self.find(xpath)}/click")
        self.clicks += 1

    def page(self, name):
        self.click(f"//a[normalize-space() = '{name}']")
        self.find(f"//h1[contains(., '{name}')] | //h3[contains(., '{name}')]")

    def filter(self, text):
        """Whether the page can be filtered; otherwise, one looks through its rows."""
        can = self.tell("/execute/sync", script="return !!document.querySelector('[name=substr]')", args=[])
        if can:
            field = self.find("//input[@name = 'substr']")
            self.tell(f"/element/{field}/value", text=f"{text}\ue007")
            self.fields += 1
            self.find(f"//input[@name = 'substr' and @value = '{text}']")
        return can

    def act(self, page, text, button):
        """Presses a button for all rows with a text."""
        self.page(page)
        if self.filter(text):
            self.click("//input[@class = 'check_all']")
        else:
            rows = f"//tr[contains(., '{text}')]"
            self.find(rows)
            for number in range(len(self.tell("/elements", using="xpath", value=rows))):
                self.click(f"({rows})[{number + 1}]//input")
        self.click(f"//input[@name = '{button}']")
        self.find(f"//body[not(.//td[contains(., '{text}')])]")

    def wrong(self):
        self.page("Dead")
        self.find("//tr[contains(., 'card.declined')]//time")

    def why(self):
        self.page("Dead")
        self.click("//tr[contains(., 'http.422')]//a[time]")
        self.find("//td[contains(., '422 Unprocessable')]")

    def by_key(self):
        self.page("Dead")
        self.filter("order-1000002")
        self.click("//tr[contains(., 'order-1000002')]//a[time]")
        self.find("//code[. = 'order-1000002']")

    def due(self):
        for page, row in [("Retries", "order-0"), ("Scheduled", "reminder-7")]:
            self.page(page)
            self.find(f"//tr[contains(., '{row}')]//time")


# Or why it is not possible.
TASKS = {
    "see what is wrong, and since when": Browser.wrong,
    "read why records of a group died": Browser.why,
    "find a dead letter by its key": Browser.by_key,
    "see the history of a record": "only the last attempt",
    "see what becomes due within an hour": Browser.due,
    "redrive one tenant at 5/s, and stop if 2% come back": "no rate, no stop",
    "correct a dead letter, and redrive it": "no edits",
    "discard the dead letters of a test": lambda browser: browser.act("Dead", "test.data", "delete"),
    "restore the dead letters of a test": "deleted for good",
    "cancel a running redrive": "no redrives",
    "pause a pipeline": "only Sidekiq Pro",
    "see who paused it, and why": "no audit log",
    "resume it": "only Sidekiq Pro",
    "limit a pipeline to 10/s": "no rates",
    "remove the limit": "no rates",
    "release the waiting records of a tier": lambda browser: browser.act("Retries", "docs", "retry"),
    "schedule a job": "only in code",
    "move a job": "only to now",
    "cancel a job": lambda browser: browser.act("Scheduled", "reminder-7", "delete"),
    "mute a group, and say why in a note": "no groups",
}

with contextlib.ExitStack() as stack:
    directory = stack.enter_context(tempfile.TemporaryDirectory())

    def start(command, ready):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        return next(found[1] for line in process.stdout if (found := re.search(ready, line)))

    with open(f"{directory}/config.ru", "w") as file:
        file.write(APP)
    redis = f"{directory}/redis"
    start(["redis-server", "--port", "0", "--unixsocket", redis, "--dir", directory, "--save", ""], "(ready to accept)")
    web = start(["env", f"REDIS_URL=unix://{redis}", "puma", "-b", "tcp://127.0.0.1:0", f"{directory}/config.ru"], r"Listening on (http://\S+)")
    browser = Browser("http://127.0.0.1:" + start(["chromedriver", "--port=0"], r"successfully on port (\d+)"))
    stack.callback(browser.tell, "/goog/cdp/execute", cmd="Browser.close", params={})
    print("Sidekiq", re.search(r"v(\d+\.\d+\.\d+)", urllib.request.urlopen(web).read().decode())[1])
    for name, task in TASKS.items():
        done = f"not possible: {task}"
        if callable(task):
            browser.clicks = browser.fields = 0
            begin = time.monotonic()
            browser.tell("/url", url=web)
            task(browser)
            done = f"{browser.clicks}, {browser.fields}, {time.monotonic() - begin:.1f} s"
        print(f"| {name} | {done} |", flush=True)
    stats = json.load(urllib.request.urlopen(f"{web}/stats"))["sidekiq"]
    assert [stats[name] for name in ("dead", "retries", "enqueued", "scheduled")] == [21, 1, 4, 0], stats
