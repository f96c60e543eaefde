"""Are projects and keys made, found and ended as they should be?"""

import hashlib

import pytest
from sqlalchemy.exc import IntegrityError

from service.db import keys
from service.db.models import ApiKey, Right
from service.db.session import Database
from service.ids import new_id


def test_a_key_is_found_by_its_plaintext_alone(database: Database) -> None:
    with database.transaction() as session:
        project = keys.create_project(session, "a")
        key, plaintext = keys.create_key(session, project.id, "ci", Right.SUBMIT)
    assert plaintext.startswith("sk-hr-")
    assert len(plaintext) == len("sk-hr-") + 43
    with database.transaction() as session:
        found = keys.find(session, plaintext)
        assert found is not None
        assert (found.id, found.project_id, found.rights) == (key.id, project.id, Right.SUBMIT)
        for wrong in ("", plaintext[:-1], plaintext + "x", plaintext.upper(), key.hint):
            assert keys.find(session, wrong) is None


def test_the_database_holds_the_hash_and_four_characters(database: Database) -> None:
    with database.transaction() as session:
        project = keys.create_project(session, "a")
        key_id = keys.create_key(session, project.id, "ci", Right.READ)[0].id
        _, plaintext = keys.create_key(session, project.id, "other", Right.READ)
    with database.transaction() as session:
        row = session.get(ApiKey, key_id)
        other = keys.find(session, plaintext)
        assert row is not None
        assert other is not None
        assert other.hash == hashlib.sha256(plaintext.encode()).digest()
        assert other.hint == f"sk-hr-…{plaintext[-4:]}"
        stored = [getattr(other, column.key) for column in ApiKey.__table__.columns]
        assert plaintext not in stored


def test_a_revoked_key_is_not_found_but_listed(database: Database) -> None:
    with database.transaction() as session:
        project = keys.create_project(session, "a")
        key, plaintext = keys.create_key(session, project.id, "ci", Right.READ)
        assert keys.revoke(session, key.id) is not None
    with database.transaction() as session:
        assert keys.find(session, plaintext) is None
        (listed,) = keys.keys_of(session, project.id)
        first = listed.revoked_at
        again = keys.revoke(session, key.id)
        assert again is not None
        assert again.revoked_at == first is not None


def test_revoking_what_is_not_there_says_so(database: Database) -> None:
    with database.transaction() as session:
        assert keys.revoke(session, new_id()) is None


def test_keys_are_listed_by_project_or_all(database: Database) -> None:
    with database.transaction() as session:
        one, two = keys.create_project(session, "one"), keys.create_project(session, "two")
        made = [keys.create_key(session, p.id, "k", Right.READ)[0].id for p in (one, two, one)]
        assert sorted(key.id for key in keys.keys_of(session)) == sorted(made)
        assert [key.id for key in keys.keys_of(session, two.id)] == [made[1]]


def test_a_project_s_name_is_its_own(database: Database) -> None:
    with database.transaction() as session:
        made = keys.create_project(session, "a")
        assert keys.project_named(session, "a") is made
        assert keys.project_named(session, "b") is None
    with pytest.raises(IntegrityError), database.transaction() as session:
        keys.create_project(session, "a")
