"""Every 5 minutes: dispatch due jobs, release due retries, process the records, and end.

For Airflow 3, with the programs and the file that REDELIVER_CONFIG names on its workers. Without applications, remove the scheduler. Without pipelines with
`http`, replace the enricher by your worker.
"""

from datetime import timedelta

import pendulum
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG


def run(program: str) -> BashOperator:
    return BashOperator(
        task_id=program,
        # The program gets the signal that ends a task. A run ends the transactions of a killed one, because it has the same instance.
        bash_command=f"exec {program} --set instance=airflow-{program} --until-idle",
        append_env=True,
        env={},
        retries=2,
        retry_delay=timedelta(seconds=30),
        execution_timeout=timedelta(minutes=50),
    )


with DAG(
    dag_id="redeliver",
    schedule="*/5 * * * *",
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    # Runs of the same instance must not overlap.
    max_active_runs=1,
):
    run("scheduler") >> run("retry-tier") >> run("enricher")
