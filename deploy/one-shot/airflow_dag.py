"""Every 5 minutes: dispatch due jobs, release due retries, process the records, and end.

For Airflow 3, with the programs and the file that REDELIVER_CONFIG names on its workers. Without applications, remove the scheduler. Without pipelines with
`http`, replace the enricher by your worker.
"""

from datetime import timedelta

import pendulum
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG


def run(program: str, minutes: int) -> BashOperator:
    return BashOperator(
        task_id=program,
        # The others run also after one that takes too long, for example a scheduler while Redis is full.
        trigger_rule="all_done",
        # The program gets the signal that ends a task. A run ends the transactions of a killed one, because it has the same instance.
        bash_command=f"exec {program} --set instance=airflow-{program} --until-idle",
        append_env=True,
        env={},
        execution_timeout=timedelta(minutes=minutes),
    )


with DAG(
    dag_id="redeliver",
    schedule="*/5 * * * *",
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    # Runs of the same instance must not overlap.
    max_active_runs=1,
):
    run("scheduler", 5) >> run("retry-tier", 10) >> run("enricher", 45)
