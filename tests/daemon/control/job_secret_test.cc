// Who may join a job: its own user with its own secret, on this node and on the others.
#include <gmock/gmock.h>

#include "daemon/control/job_secret.h"
#include "tests/daemon/control/job_run.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;
using testing::Not;

std::string hex(const Bytes& bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

shm::Attach with_secret(shm::Attach attach, const std::string& secret) {
  attach.secret = secret;
  return attach;
}

// The examples of FIPS 180-4 (NIST's "SHA256.pdf") and of RFC 6234, 8.5.
TEST(JobSecretDigest, IsSha256) {
  EXPECT_EQ(hex(sha256(bytes_of(""))),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256(bytes_of("abc"))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(bytes_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(Bytes(1'000'000, std::byte{'a'}))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// RFC 4231, cases 1, 2 and 6.
TEST(JobProof, IsHmacSha256) {
  const auto hex = [](const Bytes& bytes) {
    std::string text;
    for (const std::byte byte : bytes) text += fmt::format("{:02x}", std::to_integer<int>(byte));
    return text;
  };
  EXPECT_EQ(hex(hmac_sha256(Bytes(20, std::byte{0x0b}), bytes_of("Hi There"))),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256(bytes_of("Jefe"), bytes_of("what do ya want for nothing?"))),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(Bytes(131, std::byte{0xaa}),
                            bytes_of("Test Using Larger Than Block-Size Key - Hash Key First"))),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

// It is worth nothing the other way round, nor for another run, node, user or job.
TEST(JobProof, IsOfThoseTwoPartsAlone) {
  const Bytes digest = job_secret_digest("job", "s"), one(kNonceBytes, std::byte{1}),
              two(kNonceBytes, std::byte{2});
  const ProofParty a{0, 1000, 11, one}, b{1, 1000, 12, two};
  const Bytes proof = job_proof(digest, "job", a, b);
  EXPECT_TRUE(same_proof(proof, job_proof(digest, "job", a, b)));
  std::vector<Bytes> others = {job_proof(digest, "job", b, a), job_proof(digest, "jobs", a, b),
                               job_proof({}, "job", a, b),
                               job_proof(job_secret_digest("job", "t"), "job", a, b)};
  for (const ProofParty& other : {ProofParty{2, 1000, 11, one}, ProofParty{0, 1001, 11, one},
                                  ProofParty{0, 1000, 13, one}, ProofParty{0, 1000, 11, two}}) {
    others.push_back(job_proof(digest, "job", other, b));
  }
  for (const Bytes& other : others) EXPECT_FALSE(same_proof(proof, other));
  EXPECT_FALSE(same_proof(proof, {}));
  EXPECT_FALSE(same_proof(proof, Bytes(proof.begin(), proof.end() - 1)));
}

TEST(JobSecretDigest, DependsOnNameAndSecret) {
  EXPECT_TRUE(job_secret_digest("job", "").empty());
  EXPECT_EQ(job_secret_digest("job", "s").size(), kDigestBytes);
  EXPECT_NE(job_secret_digest("job", "s"), job_secret_digest("job", "t"));
  EXPECT_NE(job_secret_digest("job", "s"), job_secret_digest("jobs", ""));
  EXPECT_NE(job_secret_digest("a", "bc"), job_secret_digest("ab", "c"));
}

class JobSecret : public testing::Test {
 protected:
  TestNode make_node() {
    return TestNode({.nodes = 2}, std::make_shared<FakeMemory>(),
                    std::make_shared<std::uint64_t>(1));
  }
};

TEST_F(JobSecret, ARankWithAnotherSecretDoesNotJoin) {
  for (const auto& [first, second] : std::vector<std::pair<std::string, std::string>>{
           {"swordfish", "swordfisH"}, {"swordfish", ""}, {"", "swordfish"}}) {
    TestNode node = make_node();
    const ClientId owner = node.attach(with_secret(rank_of("job", 1, 2, 0), first), 77);
    const ClientId other = node.attach(with_secret(rank_of("job", 1, 2, 1), second), 78);
    const auto error = node.take<shm::ErrorReply>(other);
    ASSERT_TRUE(error) << first << "/" << second;
    EXPECT_EQ(error->code, ErrorCode::kPermission);
    EXPECT_THAT(error->message, HasSubstr("secret"));
    EXPECT_THAT(error->message, Not(HasSubstr("swordfish")));
    // The job is not disturbed: its own rank still joins.
    const ClientId own = node.attach(with_secret(rank_of("job", 1, 2, 1), first), 79);
    EXPECT_TRUE(node.take<shm::JobUp>(owner));
    EXPECT_TRUE(node.take<shm::JobUp>(own));
    for (const std::string& line : node.logged) EXPECT_THAT(line, Not(HasSubstr("swordfish")));
  }
}

TEST_F(JobSecret, RanksOfOneSecretMeetAcrossNodes) {
  TestCluster cluster(2);
  cluster.connect_all();
  std::vector<ClientId> clients;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    clients.push_back(cluster.node(rank).attach(with_secret(rank_of("job", 2, 1, rank), "s")));
  }
  cluster.settle();
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(cluster.node(rank).take<shm::JobUp>(clients[rank])) << rank;
    cluster.node(rank).hang_up(clients[rank]);
  }
  cluster.settle();
  cluster.expect_nothing_left();
}

struct Stranger {
  std::string secret;
  std::uint32_t uid;
  std::string says;
};

TEST_F(JobSecret, AnotherUsersPartOrOneOfAnotherSecretIsNotTakenAndFailsNobody) {
  for (const Stranger& stranger : {Stranger{"wrong", 1000, "secret"}, Stranger{"", 1000, "secret"},
                                   Stranger{"right", 1001, "user 1001 there, and to user 1000"}}) {
    TestCluster cluster(3);
    cluster.connect_all();
    // Early or late, the stranger's part is none of this job's.
    const auto strange = with_secret(rank_of("job", 2, 1, 1), stranger.secret);
    const ClientId early = cluster.node(1).attach(strange, 5, stranger.uid);
    cluster.settle();
    const ClientId owner =
        cluster.node(0).attach(with_secret(rank_of("job", 2, 1, 0), "right"), 6, 1000);
    cluster.settle();
    EXPECT_FALSE(cluster.node(0).take<shm::JobUp>(owner));
    EXPECT_FALSE(cluster.node(1).take<shm::JobUp>(early));
    EXPECT_FALSE(cluster.node(0).take<shm::SessionFailed>(owner));
    cluster.node(1).hang_up(early);
    cluster.settle();
    EXPECT_FALSE(cluster.node(0).take<shm::SessionFailed>(owner)) << "a stranger's end is not ours";

    const ClientId late = cluster.node(2).attach(strange, 7, stranger.uid);
    cluster.settle();
    EXPECT_FALSE(cluster.node(0).take<shm::JobUp>(owner));
    // When nobody else comes, the owner hears why.
    cluster.wait(61'000);
    const auto failure = cluster.node(0).take<shm::SessionFailed>(owner);
    ASSERT_TRUE(failure) << stranger.says;
    EXPECT_EQ(failure->code, ErrorCode::kTimeout);
    EXPECT_THAT(failure->message, HasSubstr(stranger.says));
    cluster.node(0).hang_up(owner);
    cluster.node(2).hang_up(late);
    cluster.settle();
    cluster.expect_nothing_left();
  }
}

TEST_F(JobSecret, TheOwnersPartIsTakenWhereTheStrangersWasNot) {
  TestCluster cluster(3);
  cluster.connect_all();
  cluster.node(1).attach(rank_of("job", 2, 1, 1), 5, 1001);
  const ClientId zero = cluster.node(0).attach(rank_of("job", 2, 1, 0), 6, 1000);
  cluster.settle();
  const ClientId one = cluster.node(2).attach(rank_of("job", 2, 1, 1), 7, 1000);
  cluster.settle();
  EXPECT_TRUE(cluster.node(0).take<shm::JobUp>(zero));
  EXPECT_TRUE(cluster.node(2).take<shm::JobUp>(one));
}

}  // namespace
}  // namespace mk::daemon::test
