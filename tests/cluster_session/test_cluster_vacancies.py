"""When a job gives up is decided from events and times alone."""

from shadowsync.cluster.vacancies import Vacancies


def test_a_place_is_vacant_for_too_long_only_after_its_time() -> None:
    vacancies = Vacancies(lost_after_s=10.0, min_trainers=1)
    vacancies.died("dense-0", trained=5, now=100.0)
    vacancies.died("dense-0", trained=6, now=105.0)
    assert not vacancies.too_long("dense-0", 110.0)
    assert vacancies.too_long("dense-0", 110.1)
    assert not vacancies.too_long("dense-1", 1000.0)
    vacancies.taken("dense-0")
    assert not vacancies.too_long("dense-0", 1000.0)


def test_too_few_trainers_end_a_job_unless_they_come_back_in_time() -> None:
    vacancies = Vacancies(lost_after_s=10.0, min_trainers=2)
    assert vacancies.too_few(1, 0.0) is None
    assert vacancies.too_few(1, 9.0) is None
    assert vacancies.too_few(2, 9.5) is None
    assert vacancies.too_few(1, 10.5) is None
    assert vacancies.too_few(0, 20.5) is None
    assert "cluster.min_trainers=2" in str(vacancies.too_few(1, 20.6))


def test_deaths_without_progress_end_a_job_and_progress_forgives_them() -> None:
    vacancies = Vacancies(lost_after_s=10.0, min_trainers=1, most_deaths=3)
    for number in range(3):
        vacancies.died("trainer-0", trained=100, now=float(number))
        assert vacancies.hopeless("trainer-0") is None
    vacancies.died("trainer-0", trained=101, now=4.0)
    assert vacancies.hopeless("trainer-0") is None
    for _ in range(3):  # going back and training the same rows again is no progress
        vacancies.died("embedding-0", trained=50, now=5.0)
    assert "4 roles died in a row" in str(vacancies.hopeless("embedding-0"))
