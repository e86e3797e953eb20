// Which libfabric serves which provider, and what the fabric asks of one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "daemon/fabric/ofi/domain.h"
#include "daemon/fabric/ofi/survey.h"

namespace mk::fabric::ofi {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(OfiVersionsTest, EachProviderHasItsFloorAndTheMessageSaysWhatToInstall) {
  EXPECT_TRUE(check_versions("tcp", FI_VERSION(1, 17)));
  EXPECT_TRUE(check_versions("tcp", FI_VERSION(1, 22)));
  EXPECT_TRUE(check_versions("efa", FI_VERSION(1, 20)));
  EXPECT_TRUE(check_versions("efa", FI_VERSION(2, 0)));
  const Status old = check_versions("tcp", FI_VERSION(1, 16));
  ASSERT_FALSE(old);
  EXPECT_EQ(old.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(old.error().message, AllOf(HasSubstr("1.16"), HasSubstr("1.17 or later")));
  for (const std::uint32_t minor : {17u, 18u, 19u}) {
    const Status emulates = check_versions("efa", FI_VERSION(1, minor));
    ASSERT_FALSE(emulates);
    EXPECT_THAT(emulates.error().message, AllOf(HasSubstr("1.20 or later"), HasSubstr("emulate"),
                                                HasSubstr("efa_installer")));
  }
}

TEST(OfiVersionsTest, GpuMemoryIsAskedOfEfaAloneAndOfVersionsThatKnowDmabufs) {
  EXPECT_THAT(check_gpu_memory("tcp", FI_VERSION(1, 22)).error().message, HasSubstr("only efa"));
  const Status old = check_gpu_memory("efa", FI_VERSION(1, 19));
  ASSERT_FALSE(old);
  EXPECT_THAT(old.error().message, HasSubstr("dmabuf needs 1.20 or later"));
  EXPECT_EQ(static_cast<bool>(check_gpu_memory("efa", FI_VERSION(1, 20))), MK_OFI_DMABUF == 1);
  EndpointConfig config;
  config.provider = "efa";
  const Info plain = make_hints(config);
  EXPECT_EQ(plain->caps & FI_HMEM, 0u) << "only where it is wanted";
  config.gpu_memory = true;
  const Info wanted = make_hints(config);
  EXPECT_NE(wanted->caps & FI_HMEM, 0u);
  EXPECT_NE(wanted->domain_attr->mr_mode & FI_MR_HMEM, 0);
}

TEST(OfiVersionsTest, NothingIsAskedOfAProviderBeyondWhatIsUsed) {
  const Info hints = make_hints({});
  EXPECT_EQ(hints->caps, FI_RMA | FI_WRITE | FI_REMOTE_WRITE) << "no FI_RMA_EVENT, no messages";
  EXPECT_EQ(hints->domain_attr->cq_data_size, 4u);
  EXPECT_EQ(hints->tx_attr->msg_order, 0u) << "no order is assumed";
  EXPECT_EQ(hints->rx_attr->msg_order, 0u);
}

TEST(OfiVersionsTest, TheSurveyListsEachUsableProviderOnce) {
  const Survey found = survey();
  EXPECT_EQ(found.version_number, ::fi_version());
  std::set<std::string> names;
  for (const auto& [name, version] : found.providers) {
    EXPECT_TRUE(names.insert(name + version).second) << name;
    EXPECT_FALSE(version.empty());
    EXPECT_LT(std::stoul(version), 100u) << name << " " << version << ": 1.17, not 117.0";
  }
}

TEST(OfiVersionsTest, AnInterfaceThatIsNotHereIsNamedWithThoseThatAre) {
  EndpointConfig config;
  config.provider = "tcp";
  config.bind_address = "eth77";
  const auto opened = Domain::open(config);
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(
      opened.error().message,
      AllOf(HasSubstr("no interface or address 'eth77' here; there are:"), HasSubstr("lo")));
}

TEST(OfiVersionsTest, AnAddressThatNoInterfaceHasMayComeLater) {
  EndpointConfig config;
  config.provider = "tcp";
  config.bind_address = "192.0.2.77";  // for documentation (RFC 5737): nobody has it
  const auto opened = Domain::open(config);
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(opened.error().message, HasSubstr("no interface has the address '192.0.2.77' now"));
}

}  // namespace
}  // namespace mk::fabric::ofi
