-- KEYS[1] meta
-- ARGV[1] for how many seconds an installation owns a shard that it uses
-- Returns the name of another installation that uses the shard, or false.
local found = redis.call('HMGET', KEYS[1], 'installation', 'seen')
if found[1] and found[1] ~= installation and found[2] and tonumber(seconds()) - tonumber(found[2]) < tonumber(ARGV[1]) then
  return {found[1]}
end
return {false}
